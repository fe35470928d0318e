"""Continue several prompts in one batch and print the results."""

from carryall import LLM, SamplingParams


def main() -> None:
    """Continue three prompts greedily."""
    prompts = ["def read_lines(path):\n", "class Stack:\n", "import os\n"]
    params = SamplingParams(temperature=0, max_tokens=32, stop=["\n\n\n"], logprobs=0)
    with LLM("demo", quantize="int4-fast") as llm:
        for output in llm.generate(prompts, params):
            completion = output.outputs[0]
            print(f"{output.prompt}{completion.text}")
            print(
                f"--- {len(completion.token_ids)} tokens, ended by {completion.finish_reason}, "
                f"log probability {completion.cumulative_logprob:.1f}\n"
            )


if __name__ == "__main__":
    main()
