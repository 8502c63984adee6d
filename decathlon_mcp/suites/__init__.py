"""Reading a suite: tasks, prompts, needs, conflicts, servers, and what goes into a sandbox."""

from decathlon_mcp.suites.accounts import Shared
from decathlon_mcp.suites.catalogue import Catalogue
from decathlon_mcp.suites.dialect import Dialect
from decathlon_mcp.suites.documents import broken, check, read_json, read_yaml
from decathlon_mcp.suites.draws import Draw, Filters, drawn, filtered
from decathlon_mcp.suites.here import Here
from decathlon_mcp.suites.lacks import Lack
from decathlon_mcp.suites.names import CLAIM, EVALUATE, LOCAL, spell
from decathlon_mcp.suites.pass_rates import read_pass_rates
from decathlon_mcp.suites.programs import read_absent
from decathlon_mcp.suites.prompts import Prompt
from decathlon_mcp.suites.reading import STARTER, load_suite
from decathlon_mcp.suites.servers import ServerConfig
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.suitefile import Deadlines, Service
from decathlon_mcp.suites.tasks import Needs, Task

__all__ = [
    "CLAIM",
    "EVALUATE",
    "LOCAL",
    "STARTER",
    "Catalogue",
    "Deadlines",
    "Dialect",
    "Draw",
    "Filters",
    "Here",
    "Lack",
    "Needs",
    "Prompt",
    "ServerConfig",
    "Service",
    "Shared",
    "Suite",
    "Task",
    "broken",
    "check",
    "drawn",
    "filtered",
    "load_suite",
    "read_absent",
    "read_json",
    "read_pass_rates",
    "read_yaml",
    "spell",
]
