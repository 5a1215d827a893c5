"""What tests of the API share: a tool, one call of it in the two forms that models write, and a schema."""

from api.tools import Tool

WEATHER = Tool("get_weather", {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}})
XML = ("<tool_call>\n<function=get_weather>\n<parameter=city>\nS\u00e3o \"Paulo\"\n</parameter>\n"
       "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>")
JSON = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "S\u00e3o \\"Paulo\\"", "days": 3}}\n</tool_call>'
CALL = ("get_weather", {"city": 'S\u00e3o "Paulo"', "days": 3})

# A schema that answers have to fit.
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
