import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.Producer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Sends the values 0, 1, 2 ... to partition 0 of the topic that is its first argument, until its standard input ends.
 * For each it prints {@code acked VALUE OFFSET}, or {@code failed}, the value and the exception.
 */
public class ProducerStream {
    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        for (int index = 1; index < arguments.length; index++) {
            String[] parts = arguments[index].split("=", 2);
            properties.put(parts[0], parts[1]);
        }
        try (Producer<String, String> producer =
                new KafkaProducer<>(properties, new StringSerializer(), new StringSerializer())) {
            for (int number = 0; System.in.available() == 0; number++) {
                String value = Integer.toString(number);
                producer.send(new ProducerRecord<>(arguments[0], 0, null, value), (sent, error) -> {
                    String became = error == null
                            ? "acked " + value + " " + sent.offset()
                            : "failed " + value + " " + error.toString().replace('\n', ' ');
                    System.out.println(became);
                });
                Thread.sleep(3);
            }
        }
    }
}
