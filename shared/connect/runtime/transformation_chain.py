"""The transforms of a connector, in order, each with an optional predicate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import get_logger
from penstock.shared.connect.config_def import Type, parse
from penstock.shared.connect.errors import summary_of
from penstock.shared.connect.properties import parse_aliases, with_prefix
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.redaction import Mask, unmasked
from penstock.shared.connect.runtime.plugins import Plugins, class_name
from penstock.shared.connect.transform import Predicate, Transformation

log = get_logger(__name__)


@dataclass(frozen=True)
class TransformationStage:
    """One transform. With a predicate it applies only to records that match, or with `negate` to those that do not
    match."""

    transformation: Transformation
    predicate: Predicate | None = None
    negate: bool = False

    def apply(self, record: ConnectRecord) -> ConnectRecord | None:
        if self.predicate is not None and bool(self.predicate.test(record)) is self.negate:
            return record
        return self.transformation.apply(record)


class TransformationChain:
    """The stages that a record passes until one of them drops it."""

    def __init__(self, stages: list[TransformationStage]) -> None:
        self.stages = stages

    def __bool__(self) -> bool:
        return bool(self.stages)

    def __repr__(self) -> str:
        return f"<TransformationChain {' -> '.join(type(stage.transformation).__name__ for stage in self.stages)}>"

    def close(self, mask: Mask = unmasked) -> None:
        """Close every transform and predicate. Errors are only logged, so that the task can close its clients. `mask`
        takes secrets out of them."""
        for stage in self.stages:
            for part in (stage.transformation, stage.predicate):
                try:
                    if part is not None:
                        part.close()
                except Exception as e:
                    log.error("a transform cannot be closed", plugin=class_name(type(part)), error=mask(summary_of(e)))

    @classmethod
    def of(cls, plugins: Plugins, props: Mapping[str, str]) -> TransformationChain:
        """Return the transforms that a connector's configuration names. Raises ConfigError if one of them is
        invalid."""
        stages = []
        for alias in parse_aliases(props, "transforms"):
            own = with_prefix(props, f"transforms.{alias}.")
            transformation: Transformation = plugins.make("transformation", own.get("type", ""))
            transformation.configure(type(transformation).config().parse(own))
            predicate = None
            negate = parse("negate", Type.BOOLEAN, own.get("negate", "false"))
            if (name := own.get("predicate")) is not None:
                predicate = cls._make_predicate(plugins, props, name.strip(), alias)
            stages.append(TransformationStage(transformation, predicate, negate))
        return cls(stages)

    @staticmethod
    def _make_predicate(plugins: Plugins, props: Mapping[str, str], name: str, alias: str) -> Predicate:
        if name not in parse_aliases(props, "predicates"):
            raise ConfigError(f"transforms.{alias}.predicate: {name} is not listed in 'predicates'")
        own = with_prefix(props, f"predicates.{name}.")
        predicate: Predicate = plugins.make("predicate", own.get("type", ""))
        predicate.configure(type(predicate).config().parse(own))
        return predicate
