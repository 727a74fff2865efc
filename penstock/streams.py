"""The streams engine: the DSL, the Processor API, aggregations, and the worker that runs a topology."""

from shared.streams.aggregations import Aggregate, Aggregation, Count, CountDistinct, Max, Mean, Min, Sum
from shared.streams.dsl import StreamsBuilder
from shared.streams.processor import Processor, ProcessorContext, Record
from shared.streams.punctuation import PunctuationType, Schedule
from shared.streams.session_windows import SessionWindows
from shared.streams.settings import StreamsSettings
from shared.streams.stream_worker import StreamWorker
from shared.streams.topology import Topology
from shared.streams.windowed_aggregate import WindowKey, WindowResult

__all__ = [
    "Aggregate",
    "Aggregation",
    "Count",
    "CountDistinct",
    "Max",
    "Mean",
    "Min",
    "Processor",
    "ProcessorContext",
    "PunctuationType",
    "Record",
    "Schedule",
    "SessionWindows",
    "StreamWorker",
    "StreamsBuilder",
    "StreamsSettings",
    "Sum",
    "Topology",
    "WindowKey",
    "WindowResult",
]
