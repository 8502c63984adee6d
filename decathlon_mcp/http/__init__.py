"""The ASGI application and the uvicorn server in front of the MCP endpoints."""
