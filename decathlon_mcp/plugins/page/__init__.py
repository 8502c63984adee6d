"""What people see in a browser, of a server and of state folders: the page of `serve`, and `view`."""
