"""Print text while it is generated; leaving the loop cancels the request."""

from carryall import LLM, SamplingParams


def main() -> None:
    """Print until the first two blank lines, then print the number of tokens."""
    prompt = 'def read_lines(path):\n    """'
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=100)
    written = ""
    with LLM("demo") as llm:
        for output in llm.stream(prompt, params):
            text = output.outputs[0].text
            print(text[len(written) :], end="", flush=True)
            written = text
            if "\n\n\n" in text:
                break
        stats = llm.stats()
    print(f"\n{stats.generated_tokens} tokens generated, {stats.cancelled} requests cancelled")


if __name__ == "__main__":
    main()
