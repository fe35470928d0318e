"""What a chat model writes, taken apart: reasoning, content and tool calls. One file a style of writing."""
