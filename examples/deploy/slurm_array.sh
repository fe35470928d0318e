#!/bin/sh
# A batch job as a Slurm array: 16 parts of an input, each a job with a journal of its own. Before:
#     mkdir -p parts out && split -n l/16 -d --additional-suffix=.jsonl requests.jsonl parts/
#     sbatch slurm_array.sh
# A task that is preempted is queued again, and goes on. Afterwards, in the order of the input:
#     carryall batch merge out/??.jsonl -o results.jsonl
# Lines should have a custom_id: without one they are named line-1, line-2, ... in each part.
#SBATCH --array=0-15
#SBATCH --requeue
#SBATCH --gres=gpu:1
#SBATCH --signal=TERM@60

part=$(printf %02d "$SLURM_ARRAY_TASK_ID")
exec carryall batch run "parts/$part.jsonl" -o "out/$part.jsonl" --model ./qwen3 --provider cuda
