import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Locale;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.Suppressed.BufferConfig;

/**
 * Counts sessions of a topic's records with Kafka Streams and writes closed sessions to another topic.
 *
 * The arguments are servers, topic, results, guarantee (at_least_once or exactly_once_v2), gap in ms, grace in ms,
 * commit interval in ms, warm-up records, records and a folder for the state. It uses one thread, a RocksDB store, and
 * Kafka Streams' defaults otherwise. The first records warm the JVM up and are not measured. When the others are
 * processed, it prints one line of JSON: the records per second, and the CPU microseconds of this process per record.
 */
public final class KafkaStreamsSessions {
    private static final CountDownLatch ENDED = new CountDownLatch(1);
    private static long seen, firstNanos, firstCpu, lastNanos, lastCpu;

    public static void main(String[] arguments) throws Exception {
        String servers = arguments[0], topic = arguments[1], results = arguments[2], guarantee = arguments[3];
        Duration gap = Duration.ofMillis(Long.parseLong(arguments[4]));
        Duration grace = Duration.ofMillis(Long.parseLong(arguments[5]));
        long warmUp = Long.parseLong(arguments[7]), records = Long.parseLong(arguments[8]);

        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(topic, Consumed.with(Serdes.ByteArray(), Serdes.ByteArray()))
            .peek((key, value) -> count(warmUp, warmUp + records))
            .groupByKey(Grouped.with(Serdes.ByteArray(), Serdes.ByteArray()))
            .windowedBy(SessionWindows.ofInactivityGapAndGrace(gap, grace))
            .count(Materialized.as("sessions"))
            .suppress(Suppressed.untilWindowCloses(BufferConfig.unbounded()))
            .toStream((window, n) -> window.key())
            .mapValues(n -> ("{\"n\":" + n + "}").getBytes(StandardCharsets.UTF_8))
            .to(results, Produced.with(Serdes.ByteArray(), Serdes.ByteArray()));

        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, results);
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, servers);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, guarantee);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, arguments[6]);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 1);
        settings.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, Path.of(arguments[9]).toAbsolutePath().toString());
        settings.put(StreamsConfig.consumerPrefix("auto.offset.reset"), "earliest");

        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        Throwable[] failure = new Throwable[1];
        streams.setUncaughtExceptionHandler(error -> {
            failure[0] = error;
            ENDED.countDown();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.start();
        ENDED.await();
        streams.close(Duration.ofSeconds(30));
        if (failure[0] != null) {
            System.err.println(failure[0]);
            System.exit(1);
        }
        double seconds = (lastNanos - firstNanos) / 1e9, cpuMicros = (lastCpu - firstCpu) / 1e3;
        System.out.printf(
            Locale.ROOT,
            "{\"records_per_second\": %.1f, \"cpu_us_per_record\": %.3f}%n",
            records / seconds,
            cpuMicros / records);
    }

    /** Counts one more record. There is only one thread. */
    private static void count(long first, long last) {
        if (seen == first) {
            firstNanos = System.nanoTime();
            firstCpu = cpuNanos();
        }
        if (++seen == last) {
            lastNanos = System.nanoTime();
            lastCpu = cpuNanos();
            ENDED.countDown();
        }
    }

    private static long cpuNanos() {
        var system = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        return system.getProcessCpuTime();
    }
}
