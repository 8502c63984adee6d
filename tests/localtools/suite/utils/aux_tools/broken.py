"""Cannot be imported."""

raise RuntimeError("the moon is missing")
