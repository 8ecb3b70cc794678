import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.common.errors.RetriableException;

/**
 * Creates and deletes topics as it is told on standard input, line by line, and says how many milliseconds that took.
 *
 * <p>Arguments: bootstrap servers, partitions, topics in one request. {@code create PREFIX COUNT [NAME=VALUE ...]}
 * creates PREFIX0, PREFIX1 ..., with the brokers' replication factor and these settings, one request after the other,
 * until all partitions have leaders. {@code delete PREFIX COUNT} deletes them, until no broker lists them.
 */
public class CreateTopics {
    private static final long LOOK_MS = 20;

    private final Admin admin;
    private final int partitions;
    private final int atOnce;

    private CreateTopics(Admin admin, int partitions, int atOnce) {
        this.admin = admin;
        this.partitions = partitions;
        this.atOnce = atOnce;
    }

    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", arguments[0]);
        properties.put("default.api.timeout.ms", "600000");
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        try (Admin admin = Admin.create(properties)) {
            CreateTopics client =
                    new CreateTopics(admin, Integer.parseInt(arguments[1]), Integer.parseInt(arguments[2]));
            String command;
            while ((command = commands.readLine()) != null) {
                long began = System.nanoTime();
                client.carryOut(command.split(" "));
                System.out.println((System.nanoTime() - began) / 1_000_000);
            }
        }
    }

    private void carryOut(String[] words) throws Exception {
        List<String> names = IntStream.range(0, Integer.parseInt(words[2]))
                .mapToObj(number -> words[1] + number)
                .collect(Collectors.toList());
        switch (words[0]) {
            case "create":
                Map<String, String> settings = new HashMap<>();
                for (int index = 3; index < words.length; index++) {
                    String[] setting = words[index].split("=", 2);
                    settings.put(setting[0], setting[1]);
                }
                for (List<String> some : parts(names)) {
                    admin.createTopics(some.stream()
                                    .map(name -> new NewTopic(name, Optional.of(partitions), Optional.empty())
                                            .configs(settings))
                                    .collect(Collectors.toList()))
                            .all()
                            .get();
                }
                until(() -> admin.describeTopics(names).allTopicNames().get().values().stream()
                        .allMatch(CreateTopics::isLed));
                break;
            case "delete":
                for (List<String> some : parts(names)) {
                    admin.deleteTopics(some).all().get();
                }
                until(() -> admin.listTopics().names().get().stream().noneMatch(name -> name.startsWith(words[1])));
                break;
            default:
                throw new IllegalArgumentException("no such command: " + words[0]);
        }
    }

    private List<List<String>> parts(List<String> names) {
        List<List<String>> found = new ArrayList<>();
        for (int start = 0; start < names.size(); start += atOnce) {
            found.add(names.subList(start, Math.min(start + atOnce, names.size())));
        }
        return found;
    }

    private static boolean isLed(TopicDescription topic) {
        return topic.partitions().stream().noneMatch(partition -> partition.leader() == null);
    }

    /** Ask until it is so. A broker that is asked may not have heard of a topic yet. */
    private static void until(Callable<Boolean> isSo) throws Exception {
        while (true) {
            try {
                if (isSo.call()) {
                    return;
                }
            } catch (ExecutionException error) {
                if (!(error.getCause() instanceof RetriableException)) {
                    throw error;
                }
            }
            Thread.sleep(LOOK_MS);
        }
    }
}
