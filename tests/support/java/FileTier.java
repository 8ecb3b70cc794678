import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Optional;
import org.apache.kafka.server.log.remote.storage.LogSegmentData;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata.CustomMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteResourceNotFoundException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageManager;

/** Tiered storage (KIP-405) in a directory: a file for each segment, and one for each of its indexes. */
public class FileTier implements RemoteStorageManager {
    private Path directory;

    @Override
    public void configure(Map<String, ?> settings) {
        directory = Path.of((String) settings.get("directory"));
    }

    @Override
    public Optional<CustomMetadata> copyLogSegmentData(RemoteLogSegmentMetadata metadata, LogSegmentData data)
            throws RemoteStorageException {
        try {
            Files.createDirectories(directory);
            Files.copy(data.logSegment(), file(metadata, "log"));
            Files.copy(data.offsetIndex(), file(metadata, IndexType.OFFSET.name()));
            Files.copy(data.timeIndex(), file(metadata, IndexType.TIMESTAMP.name()));
            Files.copy(data.producerSnapshotIndex(), file(metadata, IndexType.PRODUCER_SNAPSHOT.name()));
            if (data.transactionIndex().isPresent()) {
                Files.copy(data.transactionIndex().get(), file(metadata, IndexType.TRANSACTION.name()));
            }
            ByteBuffer epochs = data.leaderEpochIndex();
            byte[] bytes = new byte[epochs.remaining()];
            epochs.get(bytes);
            Files.write(file(metadata, IndexType.LEADER_EPOCH.name()), bytes);
            return Optional.empty();
        } catch (IOException error) {
            throw new RemoteStorageException(error);
        }
    }

    @Override
    public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int start) throws RemoteStorageException {
        return fetchLogSegment(metadata, start, Integer.MAX_VALUE);
    }

    @Override
    public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int start, int end)
            throws RemoteStorageException {
        InputStream found = read(file(metadata, "log"));
        try {
            found.skipNBytes(start);
        } catch (IOException error) {
            throw new RemoteStorageException(error);
        }
        return found;
    }

    @Override
    public InputStream fetchIndex(RemoteLogSegmentMetadata metadata, IndexType kind) throws RemoteStorageException {
        return read(file(metadata, kind.name()));
    }

    @Override
    public void deleteLogSegmentData(RemoteLogSegmentMetadata metadata) throws RemoteStorageException {
        String prefix = metadata.remoteLogSegmentId().id() + ".*";
        try (DirectoryStream<Path> files = Files.newDirectoryStream(directory, prefix)) {
            for (Path each : files) {
                Files.deleteIfExists(each);
            }
        } catch (IOException error) {
            throw new RemoteStorageException(error);
        }
    }

    @Override
    public void close() {}

    private Path file(RemoteLogSegmentMetadata metadata, String kind) {
        return directory.resolve(metadata.remoteLogSegmentId().id() + "." + kind);
    }

    private static InputStream read(Path file) throws RemoteStorageException {
        try {
            return Files.newInputStream(file);
        } catch (IOException error) {
            throw new RemoteResourceNotFoundException(error);
        }
    }
}
