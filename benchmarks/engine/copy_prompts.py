"""Prompts of code whose continuation repeats much of the prompt: edits and repetitive definitions."""

COPY_PROMPTS = {
    "tests": """class ParserTest(unittest.TestCase):

    def test_empty(self):
        parser = Parser()
        result = parser.parse("")
        self.assertEqual(result, None)

    def test_name(self):
        parser = Parser()
        result = parser.parse("name")
        self.assertEqual(result, "name")

    def test_value(self):
        parser = Parser()
        result = parser.parse("value")
        self.assertEqual(result, "value")

    def test_key(self):
""",
    "properties": '''class Message:

    @property
    def name(self):
        """Return the name of the message."""
        return self._name

    @property
    def value(self):
        """Return the value of the message."""
        return self._value

    @property
    def data(self):
        """Return the data of the message."""
        return self._data

    @property
    def type(self):
''',
    "checks": """def check(name, value, data, path, mode):
    if not isinstance(name, str):
        raise TypeError("name must be a string, not %s" % type(name).__name__)
    if not isinstance(value, str):
        raise TypeError("value must be a string, not %s" % type(value).__name__)
    if not isinstance(data, str):
        raise TypeError("data must be a string, not %s" % type(data).__name__)
    if not isinstance(path, str):
""",
    "edit": """# before
def read(self, size=-1):
    self._check_closed()
    if size < 0:
        return self.read_all()
    data = self._buffer[:size]
    self._buffer = self._buffer[size:]
    return data

# after
def read(self, size=-1):
    self._check_closed()
    if size < 0:
        return self.read_all()
    data = self._buffer[:size]
    self._buffer = self._buffer[size:]
    return data

# before
def write(self, data):
    self._check_closed()
    if self._buffer is None:
        raise ValueError("write to closed file")
    self._buffer.append(data)
    return len(data)

# after
def write(self, data):
    self._check_closed()
""",
    "comparisons": """    def __eq__(self, other):
        if not isinstance(other, Point):
            return NotImplemented
        return self.value == other.value

    def __ne__(self, other):
        if not isinstance(other, Point):
            return NotImplemented
        return self.value != other.value

    def __lt__(self, other):
        if not isinstance(other, Point):
            return NotImplemented
        return self.value < other.value

    def __gt__(self, other):
""",
    "arguments": """    parser = argparse.ArgumentParser()
    parser.add_argument("--name", help="the name of the file")
    parser.add_argument("--path", help="the path of the file")
    parser.add_argument("--mode", help="the mode of the file")
    parser.add_argument("--size", help="the size of the file")
    parser.add_argument("--type",""",
}
