"""The class of openai-agents for tools."""


class FunctionTool:
    def __init__(self, name, description, params_json_schema, on_invoke_tool):
        self.name = name
        self.description = description + " It is the real one."
        self.params_json_schema = params_json_schema
        self.on_invoke_tool = on_invoke_tool
