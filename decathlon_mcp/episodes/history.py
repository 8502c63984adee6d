"""What the server writes about an episode during play: in its row, its trajectory and its folder.

Changes before the episode is ready reach the row when it is ready: until then, the set-up starts over if the
server dies.
"""

from __future__ import annotations

from dataclasses import asdict

from decathlon_mcp import __version__
from decathlon_mcp.catalogue.catalogue import SuiteRevision
from decathlon_mcp.episodes.records import EpisodeRecords
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.episodes.specification import EpisodeSpec
from decathlon_mcp.episodes.state import State
from decathlon_mcp.episodes.tools.offered import OfferedTools
from decathlon_mcp.storage.kept_files import KeptFiles
from decathlon_mcp.storage.trajectory import Trajectory

TRAJECTORY_VERSION = 1
"""The version in the first line of a trajectory."""


class EpisodeHistory:
    """Writes down what happens to one episode. `files`: in its folder."""

    def __init__(
        self,
        spec: EpisodeSpec,
        factory: SandboxFactory,
        trajectory: Trajectory,
        records: EpisodeRecords,
        state: State,
    ) -> None:
        self.files = KeptFiles(trajectory.folder, trajectory.disk)
        self._spec = spec
        self._factory = factory
        self._trajectory = trajectory
        self._records = records
        self._state = state

    def write_head(self) -> None:
        """Write the first line of the trajectory: what is fixed when the episode starts, without secrets."""
        spec, factory = self._spec, self._factory
        self._trajectory.add(
            "start",
            version=TRAJECTORY_VERSION,
            suite=factory.suite.name,
            task=spec.task_name,
            **({"labels": dict(spec.labels)} if spec.labels else {}),
            **({} if spec.branch is None else {"branch": asdict(spec.branch)}),
            launch_time=spec.launch_time.isoformat(),
            language=factory.suite.language,
            names=factory.tool_names,
            limits=asdict(spec.limits),
            policy=spec.policy,
            provider=factory.provider.name,
            isolation=factory.provider.isolation,
            release=__version__,
        )

    def note_opened(self, agent: str, image_digest: str | None, *, merge_pages: bool = False) -> None:
        """The agent's sandbox, or the sandbox of preprocess, is open under this name; set-up follows."""
        self._records.note_facts(
            image_digest=image_digest, dense=merge_pages, **self._factory.suite_hooks.facts()
        )
        self._records.update(self._state.phase, agent=agent)

    def note_revision(self, revision: SuiteRevision) -> None:
        """The set-up is about to read the suite's files in this revision."""
        self._records.note_facts(
            suite_revision=revision.revision, suite_release=revision.release, suite_changed=revision.changed
        )

    def note_preprocess_failure(self, failure: str) -> None:
        """Preprocess failed, and the suite plays on."""
        self._trajectory.add("preprocess_failed", failure=failure)
        self._records.note_facts(preprocess_failure=failure)

    def note_tools(self, tools: OfferedTools) -> None:
        """The episode offers these tools."""
        self._records.update(self._state.phase, tools=tools.to_json())

    def note_change(self, change: str, calls: int) -> None:
        """A task's server has other tools than the episode lists; so many calls were sent before."""
        text = f"{change}; this episode's list stays as it is"
        self._trajectory.add("note", calls=calls, role="server", text=text)

    def note_captured(self) -> None:
        """The workspace is in an archive: the agent's sandbox is not needed any more."""
        self._records.update(self._state.phase, captured=True)
