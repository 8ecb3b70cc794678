import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.Producer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

/** A transactional producer that does what it is told on standard input, line by line, and says what came of it. */
public class TransactionSteps {
    public static void main(String[] settings) throws Exception {
        Properties properties = new Properties();
        for (String setting : settings) {
            String[] parts = setting.split("=", 2);
            properties.put(parts[0], parts[1]);
        }
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        try (Producer<String, String> producer =
                new KafkaProducer<>(properties, new StringSerializer(), new StringSerializer())) {
            String command;
            while ((command = commands.readLine()) != null) {
                String said = "done";
                try {
                    carryOut(producer, command.split(" "));
                } catch (Exception error) {
                    said = error.toString();
                }
                System.out.println(said.replace('\n', ' '));
            }
        }
    }

    private static void carryOut(Producer<String, String> producer, String[] words) throws Exception {
        switch (words[0]) {
            case "init":
                producer.initTransactions();
                break;
            case "begin":
                producer.beginTransaction();
                break;
            case "send":
                producer.send(new ProducerRecord<>(words[1], 0, null, words[2])).get();
                break;
            case "commit":
                producer.commitTransaction();
                break;
            case "abort":
                producer.abortTransaction();
                break;
            default:
                throw new IllegalArgumentException("no such command: " + words[0]);
        }
    }
}
