// Everything that org.sourcelab's Kafka Connect client can ask, of the worker at the first argument's address, with a
// file source of the file at the second one. Prints one line a step; what must not be raised is "FAILED".

import java.util.HashMap;
import java.util.Map;
import org.sourcelab.kafka.connect.apiclient.Configuration;
import org.sourcelab.kafka.connect.apiclient.KafkaConnectClient;
import org.sourcelab.kafka.connect.apiclient.request.dto.ConnectorPluginConfigDefinition;
import org.sourcelab.kafka.connect.apiclient.request.dto.ConnectorStatus;
import org.sourcelab.kafka.connect.apiclient.request.dto.NewConnectorDefinition;
import org.sourcelab.kafka.connect.apiclient.request.post.PostConnectorRestart;
import org.sourcelab.kafka.connect.apiclient.rest.exceptions.ConcurrentConfigModificationException;
import org.sourcelab.kafka.connect.apiclient.rest.exceptions.InvalidRequestException;
import org.sourcelab.kafka.connect.apiclient.rest.exceptions.ResourceNotFoundException;
import org.sourcelab.kafka.connect.apiclient.rest.exceptions.UnauthorizedRequestException;

public class TryConnectClient {
    static final int POLLS = 200, POLL_MS = 100;

    interface Step {
        Object run() throws Exception;
    }

    static void step(String name, Step step) {
        try {
            System.out.println(name + ": " + step.run());
        } catch (Exception e) {
            System.out.println("FAILED " + name + ": " + e);
        }
    }

    static void refused(String name, Class<? extends Exception> how, Step step) {
        try {
            System.out.println("FAILED " + name + ": was not refused: " + step.run());
        } catch (Exception e) {
            System.out.println((how.isInstance(e) ? "" : "FAILED ") + name + ": " + e);
        }
    }

    static void until(KafkaConnectClient client, String state) throws Exception {
        for (int i = 0; i < POLLS; i++) {
            try {
                ConnectorStatus status = client.getConnectorStatus("src");
                if (status.getConnector().get("state").equals(state)
                        && status.getTasks().stream().anyMatch(task -> task.getState().equals(state))) {
                    return;
                }
            } catch (ResourceNotFoundException e) {
                // a connector that was just made has no status yet
            }
            Thread.sleep(POLL_MS);
        }
        System.out.println("FAILED: never became " + state);
    }

    static NewConnectorDefinition connector(String name, Map<String, String> config) {
        return NewConnectorDefinition.newBuilder().withName(name).withConfig(config).build();
    }

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        Configuration known = new Configuration(url).useBasicAuth(arguments[2], arguments[3]);
        KafkaConnectClient client = new KafkaConnectClient(known);
        Map<String, String> config = new HashMap<>(Map.of(
                "connector.class", "FileStreamSource", "tasks.max", "1", "file", arguments[1], "topic", arguments[4]));
        step("version", client::getConnectServerVersion);
        step("no connectors", client::getConnectors);
        refused("missing", ResourceNotFoundException.class, () -> client.getConnector("none"));
        step("add", () -> client.addConnector(connector("src", config)));
        until(client, "RUNNING");
        refused("twice", ConcurrentConfigModificationException.class,
                () -> client.addConnector(connector("src", config)));
        refused("wrong", InvalidRequestException.class,
                () -> client.addConnector(connector("bad", Map.of("connector.class", "no.such.Class"))));
        config.put("batch.size", "7");
        step("update", () -> client.updateConnectorConfig("src", config));
        until(client, "RUNNING");
        step("statuses", client::getConnectorsWithExpandedStatus);
        step("infos", client::getConnectorsWithExpandedInfo);
        step("both", client::getConnectorsWithAllExpandedMetadata);
        step("connector", () -> client.getConnector("src"));
        step("config", () -> client.getConnectorConfig("src"));
        step("topics", () -> client.getConnectorTopics("src"));
        step("reset topics", () -> client.resetConnectorTopics("src"));
        step("restart", () -> client.restartConnector("src"));
        step("restart with tasks", () -> client.restartConnector(
                new PostConnectorRestart("src").withIncludeTasks(true).withOnlyFailed(false)));
        until(client, "RUNNING");
        step("pause", () -> client.pauseConnector("src"));
        until(client, "PAUSED");
        step("resume", () -> client.resumeConnector("src"));
        until(client, "RUNNING");
        step("tasks", () -> client.getConnectorTasks("src"));
        step("task", () -> client.getConnectorTaskStatus("src", 0));
        step("restart task", () -> client.restartConnectorTask("src", 0));
        step("plugins", client::getConnectorPlugins);
        step("validate", () -> client.validateConnectorPluginConfig(ConnectorPluginConfigDefinition.newBuilder()
                .withName("FileStreamSource").withConfig(config).withConfig("name", "v").build()));
        refused("password", UnauthorizedRequestException.class,
                () -> new KafkaConnectClient(new Configuration(url).useBasicAuth(arguments[2], "no")).getConnectors());
        step("delete", () -> client.deleteConnector("src"));
        step("connectors left", client::getConnectors);
    }
}
