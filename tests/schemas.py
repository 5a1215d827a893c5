"""Random JSON schemas, of the keywords that clients use."""


def random_schema(rng, depth=3):
    """A schema whose values are nested `depth` deep at most; rng: random.Random."""
    kinds = [_string, _number, _choice, _simple] + [_object, _array, _union] * (depth > 0)
    return rng.choice(kinds)(rng, depth - 1)


def random_object(rng, depth=3):
    """The same, of an object: what a client asks for."""
    return _object(rng, depth - 1)


def _object(rng, depth):
    names = rng.sample(["name", "age", "home town", "größe", "tags", "x", 'a "quoted" one', "unit_price"], 4)
    properties = {name: random_schema(rng, depth) for name in names[:rng.randint(1, 4)]}
    required = [name for name in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng, depth):
    least = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth), "minItems": least, "maxItems": least + 2}


def _union(rng, depth):
    return {"anyOf": [random_schema(rng, depth), {"type": "null"}]}


def _string(rng, _):
    return {"type": "string"} | rng.choice([{"maxLength": 12}, {"minLength": 2, "maxLength": 5}, {"format": "date"},
                                            {"pattern": "^[A-Z][a-z]{1,8}$"}, {"format": "uuid"}])


def _number(rng, _):
    low = rng.randint(-50, 50)
    limits = {"minimum": low, "maximum": low + rng.randint(0, 1000)}
    return {"type": rng.choice(["integer", "number"])} | limits


def _choice(rng, _):
    return rng.choice([{"enum": ["red", "green", 3, None]}, {"const": {"deep": [1, 2]}}, {"enum": ["a\nb", "ü"]}])


def _simple(rng, _):
    return {"type": rng.choice(["boolean", "null"])}
