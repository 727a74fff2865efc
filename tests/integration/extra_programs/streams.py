"""`penstock[streams]`: a window closes in the test driver."""

from penstock import Count, StreamsBuilder
from penstock.testing import TopologyTestDriver


def main() -> None:
    builder = StreamsBuilder()
    windows = builder.stream("clicks").group_by_key().tumbling_window(size=1000)
    windows.aggregate("visits", clicks=Count()).on_close().to("visits")
    driver = TopologyTestDriver(builder.build())
    for at in (0, 999, 1000):
        driver.pipe("clicks", key=b"ann", value=b"{}", timestamp=at)
    (window,) = driver.read("visits")
    print(window.value)


if __name__ == "__main__":
    main()
