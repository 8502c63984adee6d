"""The page: a server and state folders in a browser, for `serve` and `view`."""
