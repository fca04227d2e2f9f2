#include "transport/shm/socket_mesh.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/host_identity.h"
#include "base/immovable.h"
#include "base/protocol.h"
#include "base/text.h"

namespace multiring {
namespace {

/// A message that carries a tag, and has room for a descriptor.
struct FileMessage : private Immovable {
  FileMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }

  std::uint64_t tag = 0;
  iovec data{&tag, sizeof tag};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

constexpr std::uint32_t kMagic = 0x4d52494e;  // "MRIN"
constexpr int kPollMilliseconds = 50;

/// Where a rank listens: a file in the given directory, until the mesh is built. Otherwise a name in the
/// kernel's abstract namespace ("@..." here), which vanishes with the process. Any process on the host may
/// connect there: `receive_hello` checks its user.
class SocketPath : Immovable {
 public:
  explicit SocketPath(const std::string& directory, int rank) {
    // With the process id, a re-initialisation does not meet a socket of the one before.
    const std::string name = std::to_string(rank) + "-" + std::to_string(::getpid());
    path_ = directory + "/" + name + ".sock";
    if (!directory.empty() && path_.size() < sizeof(sockaddr_un{}.sun_path)) return;
    std::array<std::uint64_t, 2> random{};
    if (::getrandom(random.data(), sizeof random, 0) != static_cast<ssize_t>(sizeof random))
      throw_errno("getrandom");
    path_ = "@multiring-" + name + "-" + std::to_string(random[0]) + "-" + std::to_string(random[1]);
  }
  ~SocketPath() {
    if (path_.front() != '@') ::unlink(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct SocketName {
  sockaddr_un address{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

SocketName name_of(const std::string& path) {
  SocketName name;
  if (path.empty() || path.size() >= sizeof name.address.sun_path)
    throw Error(ErrorKind::kInternal, "no rank can listen at '" + path + "'");
  name.address.sun_family = AF_UNIX;
  std::memcpy(name.address.sun_path, path.data(), path.size());
  const bool abstract = path.front() == '@';
  if (abstract) name.address.sun_path[0] = '\0';
  name.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + (abstract ? 0 : 1));
  return name;
}

UniqueFd new_socket() {
  // SEQPACKET keeps message boundaries and reports the peer's end.
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) throw_errno("socket");
  return socket;
}

UniqueFd listen_at(const std::string& path, int backlog) {
  UniqueFd listener = new_socket();
  if (path.front() != '@') ::unlink(path.c_str());
  const SocketName name = name_of(path);
  if (::bind(listener.get(), name.get(), name.length) != 0) throw_errno("bind " + path);
  if (::listen(listener.get(), backlog) != 0) throw_errno("listen " + path);
  return listener;
}

UniqueFd open_process([[maybe_unused]] std::int64_t pid) {
#ifdef SYS_pidfd_open
  if (pid > 0) return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
  return UniqueFd();
}

[[noreturn]] void throw_missing(const SocketMesh::Options& options, const std::vector<int>& missing,
                                double waited) {
  ErrorContext context;
  context.rank = options.rank;
  context.peer = missing.empty() ? -1 : missing.front();
  context.host = host_name();
  context.operation = "init";
  context.elapsed = waited;
  throw Error(
      ErrorKind::kTimeout,
      "rank " + std::to_string(options.rank) + " on " + host_name() + " waited " +
          std::to_string(static_cast<int>(waited)) + " s in init for " + rank_list(missing) + " of " +
          std::to_string(options.size) +
          ": they have not started, have failed before init, or were given another store. Look at their "
          "output; MULTIRING_TIMEOUT sets how long to wait.",
      context);
}

}  // namespace

struct SocketMesh::Hello {
  std::uint32_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t size;
  std::uint64_t settings;
  std::int32_t cpu_quota;  ///< cores that the rank's control group allows it
  std::int32_t unused;
  cpu_set_t cpus;
  std::array<char, 64> build;  ///< cut if longer

  std::string build_text() const { return {build.data(), ::strnlen(build.data(), build.size())}; }
};

SocketMesh::SocketMesh(Store& store, const Options& options, const WaitOptions& waiting)
    : options_(options),
      peers_(static_cast<std::size_t>(options.size)),
      own_quota_(cpu_quota()),
      cores_(own_quota_) {
  CPU_ZERO(&own_cpus_);
  // It fails if there are more CPUs than a cpu_set_t has; then all are assumed.
  if (::sched_getaffinity(0, sizeof own_cpus_, &own_cpus_) != 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &own_cpus_);
  cpus_ = own_cpus_;
  peers_[static_cast<std::size_t>(options.rank)].process_id = ::getpid();
  if (options.size > 1) connect_all(store, waiting);
  cores_ = std::min(std::max(1, CPU_COUNT(&cpus_)), cores_);
}

ErrorContext SocketMesh::context_of_init(int peer) const {
  ErrorContext context;
  context.rank = options_.rank;
  context.peer = peer;
  context.host = host_name();
  context.operation = "init";
  return context;
}

void SocketMesh::connect_all(Store& store, const WaitOptions& waiting) {
  const SocketPath path(options_.socket_directory, options_.rank);
  const UniqueFd listener = listen_at(path.path(), options_.size);
  store.set("shm/" + std::to_string(options_.rank), host_identity() + "\n" + path.path(), waiting);
  // All hellos before the first answer: a lower rank answers only when it has connected to its lower ones.
  std::vector<UniqueFd> connected;
  for (int peer = 0; peer < options_.rank; ++peer)
    connected.push_back(connect_to(peer, look_up(store, peer, waiting)));
  for (int peer = 0; peer < options_.rank; ++peer) {
    UniqueFd& socket = connected[static_cast<std::size_t>(peer)];
    await_readable(socket, waiting);
    if (receive_hello(std::move(socket), false) != peer)
      throw Error(ErrorKind::kPeerLost,
                  "rank " + std::to_string(peer) + " closed its connection to rank " +
                      std::to_string(options_.rank) + " in init: it has failed, look at its output",
                  context_of_init(peer));
  }
  accept_from_higher(listener, waiting);
}

std::string SocketMesh::look_up(Store& store, int peer, const WaitOptions& waiting) const {
  std::string value;
  try {
    value = store.get("shm/" + std::to_string(peer), waiting.deadline.remaining(), waiting);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    throw_missing(options_, unpublished(store, waiting), waiting.deadline.elapsed());
  }
  const std::size_t line_end = value.find('\n');
  if (value.substr(0, line_end) != host_identity())
    throw Error(ErrorKind::kUsage, "rank " + std::to_string(peer) + " runs on another host than rank " +
                                       std::to_string(options_.rank) +
                                       ": this version of multiring joins ranks of one host only");
  return value.substr(line_end + 1);
}

std::vector<int> SocketMesh::unpublished(Store& store, const WaitOptions& waiting) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < options_.size; ++rank) {
    try {
      store.get("shm/" + std::to_string(rank), 0.0, waiting);
    } catch (const Error&) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

void SocketMesh::await_readable(const UniqueFd& socket, const WaitOptions& waiting) const {
  pollfd readable{socket.get(), POLLIN, 0};
  while (::poll(&readable, 1, kPollMilliseconds) <= 0) {
    waiting.check_interrupt();
    if (waiting.deadline.expired()) throw_missing(options_, missing(), waiting.deadline.elapsed());
  }
}

SocketMesh::Hello SocketMesh::my_hello() const {
  Hello hello{kMagic,    kProtocol, options_.rank, options_.size, options_.settings, own_quota_, 0,
              own_cpus_, {}};
  std::copy_n(options_.build.data(), std::min(options_.build.size(), hello.build.size()), hello.build.data());
  return hello;
}

UniqueFd SocketMesh::connect_to(int peer, const std::string& path) const {
  UniqueFd socket = new_socket();
  const SocketName name = name_of(path);
  if (::connect(socket.get(), name.get(), name.length) != 0)
    throw Error(ErrorKind::kPeerLost,
                "rank " + std::to_string(options_.rank) + " cannot connect to rank " + std::to_string(peer) +
                    " at " + path + ": " + std::strerror(errno) + ". Has it failed? Look at its output.",
                context_of_init(peer));
  const Hello hello = my_hello();
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
    throw_errno("send");
  return socket;
}

void SocketMesh::accept_from_higher(const UniqueFd& listener, const WaitOptions& waiting) {
  while (!missing().empty()) {
    waiting.check_interrupt();
    if (waiting.deadline.expired()) throw_missing(options_, missing(), waiting.deadline.elapsed());
    pollfd poll_listener{listener.get(), POLLIN, 0};
    if (::poll(&poll_listener, 1, kPollMilliseconds) <= 0) continue;
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (!socket) throw_errno("accept");
    receive_hello(std::move(socket), true);
  }
}

int SocketMesh::receive_hello(UniqueFd socket, bool answer) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw_errno("SO_PEERCRED");
  if (credentials.uid != ::geteuid()) return -1;
  // A hello is sent right after connecting or accepting. A process that sends none must not block this one.
  timeval limit{5, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  Hello hello{};
  ssize_t got = -1;
  do got = ::recv(socket.get(), &hello, sizeof hello, 0);
  while (got < 0 && errno == EINTR);
  // Other versions may send more or less, but start with the same fields.
  if (got < static_cast<ssize_t>(offsetof(Hello, settings))) return -1;
  // Answered before it is checked, so that both sides report settings that differ.
  const Hello mine = my_hello();
  if (answer && ::send(socket.get(), &mine, sizeof mine, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof mine))
    return -1;
  if (got != static_cast<ssize_t>(sizeof hello) || hello.magic != kMagic || hello.version != kProtocol ||
      hello.build != mine.build)
    throw Error(ErrorKind::kUsage,
                "rank " + std::to_string(hello.rank) + " runs " +
                    (got == static_cast<ssize_t>(sizeof hello) ? hello.build_text() : "another multiring") +
                    " and rank " + std::to_string(options_.rank) + " " + mine.build_text() + ", both on " +
                    host_name() + ": start all ranks with the same installation");
  if (hello.size != options_.size || hello.settings != options_.settings)
    throw Error(ErrorKind::kUsage, "rank " + std::to_string(hello.rank) + " has other settings than rank " +
                                       std::to_string(options_.rank) + " (size " +
                                       std::to_string(hello.size) + " against " +
                                       std::to_string(options_.size) + "): compare `multiring env` on both");
  if (hello.rank < 0 || hello.rank >= options_.size || hello.rank == options_.rank ||
      peers_[static_cast<std::size_t>(hello.rank)].socket)
    throw Error(ErrorKind::kUsage, "two processes claim to be rank " + std::to_string(hello.rank) +
                                       " of this job: has the launcher given every process its own rank?");
  ::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
  CPU_OR(&cpus_, &cpus_, &hello.cpus);
  cores_ = std::min(cores_, hello.cpu_quota);
  Peer& peer = peers_[static_cast<std::size_t>(hello.rank)];
  peer.socket = std::move(socket);
  peer.process_id = credentials.pid;
  peer.process = open_process(credentials.pid);
  return hello.rank;
}

std::vector<int> SocketMesh::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < options_.size; ++rank)
    if (rank != options_.rank && !peers_[static_cast<std::size_t>(rank)].socket) ranks.push_back(rank);
  return ranks;
}

bool SocketMesh::is_lost(int rank) const {
  if (rank == options_.rank) return false;
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  // The pidfd reports the end at once, also if the process is not reaped or its forks hold the socket open.
  pollfd ends[2] = {{peer.socket.get(), POLLRDHUP, 0}, {peer.process.get(), POLLIN, 0}};
  if (::poll(ends, peer.process ? 2 : 1, 0) <= 0) return false;
  return (ends[0].revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0 || (ends[1].revents & POLLIN) != 0;
}

void SocketMesh::abandon() {
  for (Peer& peer : peers_) {
    peer.socket.reset();
    peer.process.reset();
  }
}

void SocketMesh::send_file(int peer, std::uint64_t tag, const UniqueFd& file) {
  FileMessage message;
  message.tag = tag;
  cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = file.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  // The socket's queue holds far more files than a rank needs: if it is full, the peer is stuck.
  while (::sendmsg(peers_[static_cast<std::size_t>(peer)].socket.get(), &message.header, MSG_NOSIGNAL) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) return;  // it has ended; the next wait for it reports that
    if (errno != EAGAIN && errno != EINTR) throw_errno("sendmsg of shared memory");
    pollfd writable{peers_[static_cast<std::size_t>(peer)].socket.get(), POLLOUT, 0};
    ::poll(&writable, 1, kPollMilliseconds);
  }
}

UniqueFd SocketMesh::receive_file(int peer, std::uint64_t tag, const WaitOptions& waiting) {
  for (;;) {
    const bool lost = is_lost(peer);  // first, since a file that it sent before its end counts
    {
      const std::lock_guard lock(mutex_);
      while (receive_one(peer)) {
      }
      const auto found = files_.find({peer, tag});
      if (found != files_.end()) {
        UniqueFd file = std::move(found->second);
        files_.erase(found);
        return file;
      }
    }
    waiting.check_interrupt();
    if (lost || waiting.deadline.expired()) {
      ErrorContext context;
      context.rank = options_.rank;
      context.peer = peer;
      context.host = host_name();
      throw Error(lost ? ErrorKind::kPeerLost : ErrorKind::kTimeout,
                  "rank " + std::to_string(options_.rank) + " on " + host_name() +
                      " waited for shared memory from rank " + std::to_string(peer) +
                      (lost ? ", which has ended" : ", which did not come in time"),
                  context);
    }
    // Another thread may receive this file and store it in files_.
    pollfd readable{peers_[static_cast<std::size_t>(peer)].socket.get(), POLLIN, 0};
    ::poll(&readable, 1, 5);
  }
}

bool SocketMesh::receive_one(int peer) {
  FileMessage message;
  const ssize_t got = ::recvmsg(peers_[static_cast<std::size_t>(peer)].socket.get(), &message.header,
                                MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got > 0 && (message.header.msg_flags & MSG_CTRUNC) != 0)
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(options_.rank) + " on " + host_name() +
                                          " has no descriptor left for shared memory from rank " +
                                          std::to_string(peer) + ": raise `ulimit -n`");
  const cmsghdr* header =
      got == static_cast<ssize_t>(sizeof message.tag) ? CMSG_FIRSTHDR(&message.header) : nullptr;
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return false;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  files_[{peer, message.tag}] = UniqueFd(fd);
  return true;
}

}  // namespace multiring
