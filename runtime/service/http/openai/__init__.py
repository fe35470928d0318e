"""Request and response bodies of OpenAI's API. They need no web framework, so batch jobs use them too."""
