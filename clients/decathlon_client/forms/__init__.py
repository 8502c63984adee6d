"""Forms for the arguments of tools, made from their JSON Schema. What draws them is in other packages.

Requires jsonschema, of the extra `play`.
"""
