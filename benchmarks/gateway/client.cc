// A closed loop of HTTP requests: client PORT CONCURRENCY SECONDS STARTS BODY_FILE HEADER...
// STARTS: "loop": all connections begin at once and each goes on by itself; "apart": their first requests are spread over
// the warm-up; "instant": when all are answered, all begin again in one instant.
// "@@@@@@@@" in the body becomes the request's number, "%%" a number of tokens from 30 to 69. Prints one JSON line:
// requests, failures, events and seconds after the warm-up, and the sorted first-byte and whole times in microseconds.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

struct Connection {
  int fd = -1;
  std::string in, out;
  size_t scanned = 0, head = 0, length = 0;
  bool chunked = false, first = false;
  Clock::time_point begun;
};

static std::string body_template, head_lines;
static long number, requests, failures, events;
static std::vector<int> firsts, wholes;
static int port, ep;
static Clock::time_point measured_from;
static bool measuring;

static int since_us(Clock::time_point t) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - t).count();
}

static void open_one(Connection *c) {
  int one = 1;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(c->fd, (sockaddr *)&address, sizeof address)) perror("connect"), exit(1);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = c;
  epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &event);
}

static void begin(Connection *c) {
  std::string body = body_template;
  char text[16];
  size_t at = body.find("@@@@@@@@");
  snprintf(text, sizeof text, "%08ld", number++);
  if (at != std::string::npos) body.replace(at, 8, text);
  at = body.find("%%");
  snprintf(text, sizeof text, "%ld", 30 + (number * 17) % 40);
  if (at != std::string::npos) body.replace(at, 2, text);
  c->out = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + head_lines +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  c->in.clear();
  c->scanned = c->head = c->length = 0;
  c->chunked = c->first = false;
  c->begun = Clock::now();
  size_t sent = 0;
  while (sent < c->out.size()) {
    ssize_t n = send(c->fd, c->out.data() + sent, c->out.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) {
      failures++;
      close(c->fd);
      open_one(c);
      return begin(c);
    }
    sent += n;
  }
}

static bool over(Connection *c) {
  if (!c->head) {
    size_t end = c->in.find("\r\n\r\n");
    if (end == std::string::npos) return false;
    c->head = c->scanned = end + 4;
    std::string head = c->in.substr(0, c->head);
    const char *found = strcasestr(head.c_str(), "content-length:");
    if (found) c->length = atol(found + 15);
    c->chunked = strcasestr(head.c_str(), "transfer-encoding: chunked");
    if (head.compare(9, 3, "200")) {
      failures++;
      if (failures < 3) fprintf(stderr, "%s\n", c->in.c_str());
    }
  }
  for (size_t at; (at = c->in.find("data: ", c->scanned)) != std::string::npos; c->scanned = at + 6) {
    if (measuring) events++;
    // The first event holds the role; what a reader waits for is the first with text, which the engine sends with it.
    if (!c->first) {
      c->first = true;
      if (measuring && c->begun >= measured_from) firsts.push_back(since_us(c->begun));
    }
  }
  if (c->scanned + 6 < c->in.size()) c->scanned = std::max(c->scanned, c->in.size() - 6);
  if (!c->chunked) return c->in.size() >= c->head + c->length;
  return c->in.size() >= 5 && !c->in.compare(c->in.size() - 5, 5, "0\r\n\r\n") &&
         (c->in.size() == c->head + 5 || c->in[c->in.size() - 6] == '\n');
}

static void print(const char *name, std::vector<int> &values) {
  std::sort(values.begin(), values.end());
  printf(",\"%s\":[", name);
  size_t step = std::max<size_t>(1, values.size() / 4000);  // sorted: every so many keep the shape
  for (size_t i = 0; i < values.size(); i += step) printf(i ? ",%d" : "%d", values[i]);
  printf("]");
}

int main(int argc, char **argv) {
  if (argc < 6) return 2;
  port = atoi(argv[1]);
  int concurrency = atoi(argv[2]);
  double seconds = atof(argv[3]);
  bool apart = !strcmp(argv[4], "apart"), instant = !strcmp(argv[4], "instant");
  std::ifstream file(argv[5]);
  body_template.assign(std::istreambuf_iterator<char>(file), {});
  for (int i = 6; i < argc; i++) head_lines += std::string(argv[i]) + "\r\n";
  number = getpid() % 1000 * 10000L;
  ep = epoll_create1(0);
  std::vector<Connection> all(concurrency);
  for (auto &c : all) open_one(&c);
  if (!apart)
    for (auto &c : all) begin(&c);
  int begun = apart ? 0 : concurrency, answered = 0;
  auto started = Clock::now();
  double warm = std::min(1.0, seconds * 0.3);
  epoll_event ready[512];
  for (;;) {
    double at = since_us(started) / 1e6;
    if (!measuring && at >= warm) measuring = true, measured_from = Clock::now();
    if (at >= warm + seconds) break;
    while (begun < concurrency && at >= warm * begun / concurrency) begin(&all[begun++]);
    int count = epoll_wait(ep, ready, 512, begun < concurrency ? 1 : 100);
    for (int i = 0; i < count; i++) {
      auto *c = (Connection *)ready[i].data.ptr;
      char data[65536];
      ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
      if (n <= 0) {
        if (n < 0 && errno == EAGAIN) continue;
        failures++;
        close(c->fd);
        open_one(c);
        begin(c);
        continue;
      }
      c->in.append(data, n);
      if (over(c)) {
        if (measuring) {
          requests++;
          if (c->begun >= measured_from) wholes.push_back(since_us(c->begun));
        }
        if (!instant) {
          begin(c);
        } else if (++answered == concurrency) {
          answered = 0;
          for (auto &each : all) begin(&each);
        }
      }
    }
  }
  printf("{\"requests\":%ld,\"failures\":%ld,\"events\":%ld,\"seconds\":%.6f", requests, failures, events,
         since_us(measured_from) / 1e6);
  print("first_us", firsts);
  print("whole_us", wholes);
  puts("}");
}
