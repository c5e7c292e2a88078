package io.llamarack.client;

import java.util.Map;

/** Whether the server takes requests now. */
public final class Health extends JsonView {
    private final int status;

    Health(int status, Map<String, Object> raw) {
        super(raw);
        this.status = status;
    }

    /**
     * Whether requests are served now.
     *
     * @return true for status 200, false while loading, draining or without a replica
     */
    public boolean isReady() {
        return status == 200;
    }

    /**
     * The HTTP status of the health path.
     *
     * @return 200 or an error status
     */
    public int status() {
        return status;
    }
}
