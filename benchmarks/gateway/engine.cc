// A fake OpenAI engine that is never the bottleneck: one thread, epoll, one event of every running stream a step.
// engine PORT STEP_US SOCKET    (step 0: as fast as the sockets take them)
// It listens at the port of this machine and at the Unix socket.
// Tokens vary, since one of the gateways measured cuts repeated ones. Prints "listening" once it accepts.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <unordered_map>

static const char *kTokens[] = {" The", " harbour", " opens", " at", " seven", ",", " and", " boats", " leave", " for",
                                " every", " old", " crane", " above", " rain", " falls"};

struct Connection {
  int fd;
  std::string in, out;
  bool streaming = false, waits_to_write = false, tells_usage = false;
  int sent = 0, wanted = 0;
};

static int ep;
static std::unordered_map<int, Connection *> connections;
static std::set<int> streams;

static void watch(Connection *c, bool writing) {
  epoll_event event{};
  event.events = EPOLLIN | (writing ? EPOLLOUT : 0);
  event.data.fd = c->fd;
  epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &event);
  c->waits_to_write = writing;
}

static void drop(Connection *c) {
  streams.erase(c->fd);
  connections.erase(c->fd);
  close(c->fd);
  delete c;
}

static bool flush(Connection *c) {
  while (!c->out.empty()) {
    ssize_t n = send(c->fd, c->out.data(), c->out.size(), MSG_NOSIGNAL);
    if (n < 0) {
      if (errno != EAGAIN) return false;
      if (!c->waits_to_write) watch(c, true);
      return true;
    }
    c->out.erase(0, n);
  }
  if (c->waits_to_write) watch(c, false);
  return true;
}

static void event(Connection *c, const std::string &data) {
  char size[16];
  snprintf(size, sizeof size, "%zx\r\n", data.size());
  c->out += size + data + "\r\n";
}

static std::string chunk(int number, const char *delta, const char *reason) {
  char text[400];
  snprintf(text, sizeof text,
           "data: {\"id\":\"chatcmpl-%d\",\"object\":\"chat.completion.chunk\",\"created\":1796000000,\"model\":\"fake\","
           "\"choices\":[{\"index\":0,\"delta\":%s,\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
           number, delta, reason);
  return text;
}

static void step(Connection *c) {
  if (c->sent < c->wanted) {
    char delta[64];
    snprintf(delta, sizeof delta, "{\"content\":\"%s\"}", kTokens[(c->sent * 7 + c->fd) % 16]);
    event(c, chunk(c->fd, delta, "null"));
    c->sent++;
    return;
  }
  event(c, chunk(c->fd, "{}", "\"length\""));
  if (c->tells_usage) {
    char usage[300];
    snprintf(usage, sizeof usage,
             "data: {\"id\":\"chatcmpl-%d\",\"object\":\"chat.completion.chunk\",\"created\":1796000000,\"model\":\"fake\","
             "\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\n",
             c->fd, c->sent, c->sent + 9);
    event(c, usage);
  }
  event(c, "data: [DONE]\n\n");
  c->out += "0\r\n\r\n";
  c->streaming = false;
  streams.erase(c->fd);
}

static void answer(Connection *c, const std::string &body) {
  char head[200];
  snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", body.size());
  c->out += head + body;
}

static void request(Connection *c, const std::string &head, const std::string &body) {
  if (head.rfind("POST", 0) != 0) {
    if (head.find("/models") != std::string::npos)
      return answer(c, "{\"object\":\"list\",\"data\":[{\"id\":\"fake\",\"object\":\"model\",\"created\":1,\"owned_by\":\"x\"}]}");
    if (head.find("/metrics") != std::string::npos) return answer(c, "");
    return answer(c, "{\"status\":\"ok\",\"model_path\":\"fake\",\"is_generation\":true}");
  }
  int wanted = 16;
  size_t at = body.find("\"max_tokens\"");
  if (at != std::string::npos) wanted = atoi(body.c_str() + body.find(':', at) + 1);
  size_t stream = body.find("\"stream\"");
  if (stream != std::string::npos && body.find("true", stream) < stream + 14) {
    c->out += "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    event(c, chunk(c->fd, "{\"role\":\"assistant\",\"content\":\"\"}", "null"));
    c->streaming = true;
    c->tells_usage = body.find("\"include_usage\":true") != std::string::npos;
    c->sent = 0;
    c->wanted = wanted;
    streams.insert(c->fd);
    step(c);
    return;
  }
  answer(c,
         "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1796000000,\"model\":\"fake\",\"choices\":[{\"index\":0,"
         "\"message\":{\"role\":\"assistant\",\"content\":\"The harbour opens at seven, and boats leave for every old crane.\"},"
         "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":12,\"total_tokens\":21}}");
}

static bool take(Connection *c) {
  for (;;) {
    size_t end = c->in.find("\r\n\r\n");
    if (end == std::string::npos) return true;
    size_t length = 0;
    const char *found = strcasestr(c->in.c_str(), "content-length:");
    if (found && found < c->in.c_str() + end) length = atol(found + 15);
    if (c->in.size() < end + 4 + length) return true;
    std::string head = c->in.substr(0, end), body = c->in.substr(end + 4, length);
    c->in.erase(0, end + 4 + length);
    request(c, head, body);
  }
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  int step_us = atoi(argv[2]), one = 1;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(atoi(argv[1]));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, (sockaddr *)&address, sizeof address) || listen(listener, 1024)) return perror("listen"), 1;
  int local = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  snprintf(path.sun_path, sizeof path.sun_path, "%s", argv[3]);
  unlink(argv[3]);
  if (bind(local, (sockaddr *)&path, sizeof path) || listen(local, 1024)) return perror("listen"), 1;
  ep = epoll_create1(0);
  epoll_event event{};
  event.events = EPOLLIN;
  for (int fd : {listener, local}) {
    event.data.fd = fd;
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event);
  }
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  if (step_us) {
    itimerspec every{};
    every.it_interval.tv_nsec = every.it_value.tv_nsec = step_us * 1000L;
    timerfd_settime(timer, 0, &every, nullptr);
  }
  event.data.fd = timer;
  epoll_ctl(ep, EPOLL_CTL_ADD, timer, &event);
  puts("listening");
  fflush(stdout);
  epoll_event ready[512];
  for (;;) {
    int count = epoll_wait(ep, ready, 512, !step_us && !streams.empty() ? 0 : -1);
    bool turn = false;
    for (int i = 0; i < count; i++) {
      int fd = ready[i].data.fd;
      if (fd == listener || fd == local) {
        int got;
        while ((got = accept4(fd, nullptr, nullptr, SOCK_NONBLOCK)) >= 0) {
          if (fd == listener) setsockopt(got, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
          connections[got] = new Connection{got};
          event.events = EPOLLIN;
          event.data.fd = got;
          epoll_ctl(ep, EPOLL_CTL_ADD, got, &event);
        }
      } else if (fd == timer) {
        uint64_t times;
        if (read(timer, &times, sizeof times) > 0) turn = true;
      } else {
        auto known = connections.find(fd);
        if (known == connections.end()) continue;
        Connection *c = known->second;
        if (ready[i].events & EPOLLIN) {
          char data[65536];
          ssize_t n = recv(fd, data, sizeof data, 0);
          if (n == 0 || (n < 0 && errno != EAGAIN)) {
            drop(c);
            continue;
          }
          if (n > 0) c->in.append(data, n);
          take(c);
        }
        if (!flush(c)) drop(c);
      }
    }
    if (turn || !step_us) {
      std::set<int> running = streams;
      for (int fd : running) {
        Connection *c = connections[fd];
        if (c->out.size() > 65536) continue;
        step(c);
        if (!flush(c)) drop(c);
      }
    }
  }
}
