"""A model as a step of a Ray Data pipeline that can be stopped and started again.

    pip install 'carryall[ray]'
    python examples/batch_ray_data.py reviews/ labels/ ./qwen3

Both folders and the checkpoint must be on storage that all nodes see.
"""

import sys

import ray
from ray.data.checkpoint import CheckpointConfig

import carryall


def main(source: str, output: str, model: str) -> None:
    """Answer the rows of Parquet files with the columns `id` and `text`."""
    ray.init()
    # Rows whose answers were written are left out by the next run.
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=f"{output}.checkpoint", delete_checkpoint_on_success=False
    )
    rows = ray.data.read_parquet(source).map_batches(
        carryall.batch.RayPredictor,
        fn_constructor_kwargs={
            "model": carryall.batch.share_model(model),  # a hub id is given as it is
            "template": "Judge this review: {{ text }}",
            "kind": "chat",
            "sampling": {"temperature": 0, "max_tokens": 64},
        },
        batch_size=256,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=8),
        num_cpus=4,
    )
    rows.write_parquet(output)


if __name__ == "__main__":
    main(*sys.argv[1:4])
