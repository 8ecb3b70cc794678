import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * Reads the topic that is its first argument, as a member of a group, until its standard input ends. It prints
 * {@code read OFFSET VALUE}, and {@code failed} with what was raised.
 */
public class ConsumerStream {
    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        for (int index = 1; index < arguments.length; index++) {
            String[] parts = arguments[index].split("=", 2);
            properties.put(parts[0], parts[1]);
        }
        try (KafkaConsumer<String, String> consumer =
                new KafkaConsumer<>(properties, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(arguments[0]));
            while (System.in.available() == 0) {
                try {
                    for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100))) {
                        System.out.println("read " + record.offset() + " " + record.value());
                    }
                } catch (KafkaException error) {
                    System.out.println("failed " + error.toString().replace('\n', ' '));
                    Thread.sleep(50);
                }
            }
        }
    }
}
