import java.util.Map;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.PolicyViolationException;
import org.apache.kafka.server.policy.AlterConfigPolicy;
import org.apache.kafka.server.policy.CreateTopicPolicy;

/** What a company may ask of topics: no segment.ms under an hour, and those named "finite" do not keep all for ever. */
public class HouseRules {
    private static void check(String topic, Map<String, String> settings) {
        String roll = settings.get("segment.ms");
        if (roll != null && Long.parseLong(roll) < 3_600_000) {
            throw new PolicyViolationException("house rule: segment.ms is an hour at least, not " + roll);
        }
        if (topic.contains("finite") && "-1".equals(settings.get("retention.ms"))) {
            throw new PolicyViolationException("house rule: " + topic + " has a retention.ms");
        }
    }

    public static class OfCreation implements CreateTopicPolicy {
        @Override
        public void validate(RequestMetadata request) {
            check(request.topic(), request.configs());
        }

        @Override
        public void configure(Map<String, ?> settings) {}

        @Override
        public void close() {}
    }

    public static class OfChanges implements AlterConfigPolicy {
        @Override
        public void validate(RequestMetadata request) {
            if (request.resource().type() == ConfigResource.Type.TOPIC) {
                check(request.resource().name(), request.configs());
            }
        }

        @Override
        public void configure(Map<String, ?> settings) {}

        @Override
        public void close() {}
    }
}
