"""From a closed attempt to a signed verdict."""
