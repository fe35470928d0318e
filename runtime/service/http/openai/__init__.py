"""OpenAI's API: JSON shapes, which import no web framework, so that batch jobs use them too."""
