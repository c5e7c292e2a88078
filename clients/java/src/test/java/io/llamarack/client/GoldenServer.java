package io.llamarack.client;

import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** An HTTP/1.1 server on raw sockets: what it sends, and when, is exactly what the test wrote. */
final class GoldenServer implements AutoCloseable {
    /** Answers one request; closing the socket is one of the answers. */
    interface Handler {
        void handle(Exchange exchange) throws IOException, InterruptedException;
    }

    private final ServerSocket listener;
    private final Handler handler;
    private final List<Socket> sockets = new CopyOnWriteArrayList<>();
    final List<Request> requests = new CopyOnWriteArrayList<>();
    final AtomicInteger connections = new AtomicInteger();
    final CountDownLatch clientGone = new CountDownLatch(1);

    GoldenServer(Handler handler) {
        this.handler = handler;
        try {
            listener = new ServerSocket(0, 200, InetAddress.getLoopbackAddress());
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        Transport.daemon(this::accept, "golden-accept").start();
    }

    String url() {
        return "http://127.0.0.1:" + listener.getLocalPort();
    }

    LlamarackClientBuilder client() {
        return LlamarackClient.builder().baseUrl(url());
    }

    boolean sawDisconnect() throws InterruptedException {
        return clientGone.await(10, TimeUnit.SECONDS);
    }

    private void accept() {
        while (!listener.isClosed()) {
            try {
                Socket socket = listener.accept();
                socket.setTcpNoDelay(true);
                sockets.add(socket);
                connections.incrementAndGet();
                Transport.daemon(() -> serve(socket), "golden-connection").start();
            } catch (IOException closed) {
                return;
            }
        }
    }

    private void serve(Socket socket) {
        try (socket) {
            InputStream in = new BufferedInputStream(socket.getInputStream());
            Request request = Request.read(in);
            while (request != null) {
                requests.add(request);
                handler.handle(new Exchange(this, request, requests.size(), socket, in));
                request = Request.read(in);
            }
        } catch (IOException | InterruptedException gone) {
            clientGone.countDown();
        }
    }

    @Override
    public void close() throws IOException {
        listener.close();
        for (Socket socket : sockets) {
            socket.close();
        }
    }

    static final class Request {
        final String line;
        final Map<String, String> headers;
        final String body;

        private Request(String line, Map<String, String> headers, String body) {
            this.line = line;
            this.headers = headers;
            this.body = body;
        }

        static Request read(InputStream in) throws IOException {
            String line = readLine(in);
            if (line == null) {
                return null;
            }
            Map<String, String> headers = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
            for (String header = readLine(in); header != null && !header.isEmpty(); header = readLine(in)) {
                headers.put(header.substring(0, header.indexOf(':')), header.substring(header.indexOf(':') + 1).strip());
            }
            int length = Integer.parseInt(headers.getOrDefault("content-length", "0"));
            return new Request(line, headers, new String(in.readNBytes(length), StandardCharsets.UTF_8));
        }

        private static String readLine(InputStream in) throws IOException {
            ByteArrayOutputStream line = new ByteArrayOutputStream();
            for (int b = in.read(); b != '\n'; b = in.read()) {
                if (b < 0) {
                    return null;
                }
                line.write(b);
            }
            return line.toString(StandardCharsets.ISO_8859_1).stripTrailing();
        }
    }

    static final class Exchange {
        final Request request;
        /** 1 for the first request of this server. */
        final int number;
        final Socket socket;
        private final GoldenServer server;
        private final OutputStream out;
        private final InputStream in;

        Exchange(GoldenServer server, Request request, int number, Socket socket, InputStream in) throws IOException {
            this.server = server;
            this.request = request;
            this.number = number;
            this.socket = socket;
            this.in = in;
            this.out = socket.getOutputStream();
        }

        void json(int status, String body, String... headers) throws IOException {
            byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
            head(status, "application/json", "Content-Length: " + bytes.length, headers);
            out.write(bytes);
            out.flush();
        }

        void startStream(String... headers) throws IOException {
            head(200, "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked", headers);
        }

        private void head(int status, String type, String framing, String... headers) throws IOException {
            StringBuilder head = new StringBuilder("HTTP/1.1 ").append(status).append(" Golden\r\nContent-Type: ")
                    .append(type).append("\r\n").append(framing).append("\r\n");
            for (String header : headers) {
                head.append(header).append("\r\n");
            }
            out.write(head.append("\r\n").toString().getBytes(StandardCharsets.ISO_8859_1));
            out.flush();
        }

        void chunk(byte[] bytes) throws IOException {
            ByteArrayOutputStream framed = new ByteArrayOutputStream();
            framed.writeBytes((Integer.toHexString(bytes.length) + "\r\n").getBytes(StandardCharsets.ISO_8859_1));
            framed.writeBytes(bytes);
            framed.writeBytes("\r\n".getBytes(StandardCharsets.ISO_8859_1));
            out.write(framed.toByteArray());
            out.flush();
        }

        void chunk(String text) throws IOException {
            chunk(text.getBytes(StandardCharsets.UTF_8));
        }

        void data(String json) throws IOException {
            chunk("data: " + json + "\n\n");
        }

        void endStream() throws IOException {
            out.write("0\r\n\r\n".getBytes(StandardCharsets.ISO_8859_1));
            out.flush();
        }

        /** A complete stream of these events and [DONE]. */
        void stream(String... events) throws IOException {
            startStream();
            for (String event : events) {
                data(event);
            }
            data("[DONE]");
            endStream();
        }

        /** Sends RST: the peer sees "Connection reset". */
        void reset() throws IOException {
            socket.setSoLinger(true, 0);
            socket.close();
        }

        /** Returns when the client has closed the connection. */
        void awaitDisconnect() throws IOException {
            try {
                while (in.read() >= 0) {
                    // A client sends nothing after its request.
                }
            } catch (IOException reset) {
                // A reset is a disconnect too.
            }
            server.clientGone.countDown();
            socket.close();
        }
    }

    static String delta(String text) {
        return "{\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
                + "\"delta\":{\"content\":\"" + text + "\"},\"finish_reason\":null}]}";
    }

    static String finish(String reason) {
        return "{\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
                + "\"delta\":{},\"finish_reason\":\"" + reason + "\"}]}";
    }

    static String usage(int prompt, int completion) {
        return "{\"id\":\"c1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[],"
                + "\"usage\":{\"prompt_tokens\":" + prompt + ",\"completion_tokens\":" + completion
                + ",\"total_tokens\":" + (prompt + completion) + "}}";
    }

    static String answer(String text) {
        return "{\"id\":\"c1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
                + "\"message\":{\"role\":\"assistant\",\"content\":\"" + text + "\"},\"finish_reason\":\"stop\"}],"
                + "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}}";
    }

    static String error(String message, String code) {
        return "{\"error\":{\"message\":\"" + message + "\",\"type\":\"server_error\",\"param\":null,\"code\":\""
                + code + "\"}}";
    }
}
