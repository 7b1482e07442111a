"""Candidates as people call them: `xca:variant=fair,lpi=true` is `XCA + LPI (fair)`."""

ABBREVIATIONS = {"xca": "XCA", "lpi": "LPI"}


def readable(candidate: str) -> str:
    """A mechanism's name with its options in words; without options as one types it."""
    mechanism, _, options = candidate.partition(":")
    name, added, variants, rest = ABBREVIATIONS.get(mechanism, mechanism), "", [], []
    for option in filter(None, options.split(",")):
        key, given, value = option.partition("=")
        word = ABBREVIATIONS.get(key, key.replace("_", " "))
        if key == "variant":
            variants.append(value)
        elif key == mechanism == "window" and value.isdigit():
            name += f" {value} × {value}"
        elif mechanism == "mixa" and key == "keep":
            rest.append(f"{value} quadratic")
        elif mechanism == "mixa" and key in ("where", "layers"):
            rest.append(value)
        elif value.lower() == "true":
            added += f" + {word}"
        elif value.lower() == "false":
            rest.append(f"no {word}")
        else:
            rest.append(f"{word} {value}" if given else word)
    return ", ".join([name + added, *rest]) + "".join(f" ({variant})" for variant in variants)
