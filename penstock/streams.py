"""The streams engine: the DSL, the Processor API, aggregations, and the worker that runs a topology."""

from shared.streams.aggregations import Aggregate, Aggregation, Count, CountDistinct, Max, Mean, Min, Sum
from shared.streams.collecting import CollectList, CollectSet, First, Last
from shared.streams.dsl import GlobalTable, Stream, StreamsBuilder, Table
from shared.streams.error_handlers import ErrorHandlers
from shared.streams.processor import Processor, ProcessorContext, Record
from shared.streams.punctuation import PunctuationType, Schedule
from shared.streams.quantiles import Quantiles
from shared.streams.session_windows import SessionWindows
from shared.streams.settings import StreamsSettings
from shared.streams.sliding_windows import SlidingWindows
from shared.streams.state.state_directory import StateDirectory
from shared.streams.stream_join import JoinWindows
from shared.streams.stream_worker import StreamWorker
from shared.streams.time_windows import TimeWindows
from shared.streams.topology import Topology
from shared.streams.windowed_aggregate import WindowKey, WindowResult

__all__ = [
    "Aggregate",
    "Aggregation",
    "CollectList",
    "CollectSet",
    "Count",
    "CountDistinct",
    "ErrorHandlers",
    "First",
    "GlobalTable",
    "JoinWindows",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Processor",
    "ProcessorContext",
    "PunctuationType",
    "Quantiles",
    "Record",
    "Schedule",
    "SessionWindows",
    "SlidingWindows",
    "StateDirectory",
    "Stream",
    "StreamWorker",
    "StreamsBuilder",
    "StreamsSettings",
    "Sum",
    "Table",
    "TimeWindows",
    "Topology",
    "WindowKey",
    "WindowResult",
]
