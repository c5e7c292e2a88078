package io.llamarack.client;

import java.net.http.HttpHeaders;
import java.nio.ByteBuffer;

/**
 * Takes the body of a successful answer. Calls come one after another; {@link #fail} may come at any time,
 * from any thread. One of {@link #succeed} and {@link #fail} is the last.
 */
interface Receiver {
    /** An attempt was answered 2xx; whatever an earlier attempt brought is void. */
    void begin(HttpHeaders headers, Attempt attempt);

    /** Takes all bytes; asks the attempt for more when it wants more. */
    void bytes(ByteBuffer bytes);

    /** All bytes of this read were given. */
    void pause();

    /** The body is complete. Throws when the answer is not. */
    void end();

    /** Whether something of the answer has reached, or may have reached, the caller. */
    boolean hasDelivered();

    /** The failure as the caller should see it, with what was received before it. */
    LlamarackException describe(LlamarackException failure);

    /** The call is over and well: hands the answer to the caller. */
    void succeed();

    /** The call is over: hands the failure to the caller. */
    void fail(LlamarackException failure);
}
