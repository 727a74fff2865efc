"""The streams engine: the DSL, the Processor API, aggregations, and the worker that runs a topology."""

from penstock.shared.common.extras import needs as _needs
from penstock.shared.common.public_names import publish as _publish

with _needs("penstock.streams", "streams"):
    from penstock.shared.streams.aggregations.aggregation import (
        Aggregate,
        Aggregation,
        Count,
        CountDistinct,
        Max,
        Mean,
        Min,
        Sum,
    )
    from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
    from penstock.shared.streams.aggregations.first_last import First, Last
    from penstock.shared.streams.aggregations.quantiles import Quantiles
    from penstock.shared.streams.dsl.builder import (
        GlobalTable,
        GroupedStream,
        Stream,
        StreamsBuilder,
        Table,
        WindowedGroup,
        WindowedTable,
    )
    from penstock.shared.streams.error_handlers import ErrorHandlers
    from penstock.shared.streams.operators.stream_join import JoinWindows
    from penstock.shared.streams.processor import Processor, ProcessorContext
    from penstock.shared.streams.punctuation import PunctuationType, Punctuator, Schedule
    from penstock.shared.streams.record import Record
    from penstock.shared.streams.runtime.stream_worker import StreamWorker
    from penstock.shared.streams.settings import StreamsSettings
    from penstock.shared.streams.state.key_value_store import KeyValueStore
    from penstock.shared.streams.state.state_directory import StateDirectory
    from penstock.shared.streams.state.store_builder import StoreBuilder
    from penstock.shared.streams.topology import Topology
    from penstock.shared.streams.window_result import WindowKey, WindowResult

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
    "GroupedStream",
    "JoinWindows",
    "KeyValueStore",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Processor",
    "ProcessorContext",
    "PunctuationType",
    "Punctuator",
    "Quantiles",
    "Record",
    "Schedule",
    "StateDirectory",
    "StoreBuilder",
    "Stream",
    "StreamWorker",
    "StreamsBuilder",
    "StreamsSettings",
    "Sum",
    "Table",
    "Topology",
    "WindowKey",
    "WindowResult",
    "WindowedGroup",
    "WindowedTable",
]

_publish(__name__, globals(), __all__)
