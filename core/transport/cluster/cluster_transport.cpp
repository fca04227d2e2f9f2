#include "transport/cluster/cluster_transport.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

namespace multiring {
namespace {

using Outcome = WaitResult::Outcome;

constexpr int kLooksForACause = 20;
constexpr std::chrono::milliseconds kLookForACause(10);

const ClusterRank& rank_of(const ClusterContext& context, int world) {
  return context.ranks[static_cast<std::size_t>(world)];
}

/// The members as the link of this host knows them.
std::vector<int> link_ranks(const ClusterContext& context, const std::vector<int>& members) {
  std::vector<int> ranks;
  for (const int member : members) {
    const ClusterRank& rank = rank_of(context, member);
    const bool here = rank.host == rank_of(context, context.rank).host;
    ranks.push_back(here ? rank.local : SharedTransport::kElsewhere);
  }
  return ranks;
}

}  // namespace

std::vector<int> ranks_of_host(const std::vector<ClusterRank>& ranks, int host) {
  std::vector<int> found;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const ClusterRank& place = ranks[rank];
    if (place.host != host) continue;
    found.resize(std::max(found.size(), static_cast<std::size_t>(place.local) + 1), -1);
    found[static_cast<std::size_t>(place.local)] = static_cast<int>(rank);
  }
  return found;
}

ClusterTransport::ClusterTransport(std::shared_ptr<const ClusterContext> context, std::vector<int> members,
                                   std::uint64_t tag, const SharedTransportOptions& options,
                                   const Waiting& waiting)
    : SharedTransport(context->link, link_ranks(*context, members), tag, options, waiting),
      context_(std::move(context)),
      own_tag_(tag),
      world_(std::move(members)) {
  for (int other = 0; other < size(); ++other)
    if (is_elsewhere(other)) remote_.push_back(other);
  connect(waiting);
}

// The networks first: they have receives posted in the memory of the host.
ClusterTransport::~ClusterTransport() {
  ClusterTransport::leave();
  mail_entry_.reset();
  hierarchy_.reset();
  mail_.reset();
  mirror_.reset();
}

std::string ClusterTransport::network_name() const {
  char name[64];
  std::snprintf(name, sizeof name, "%016llx-%d", static_cast<unsigned long long>(own_tag_), world_[0]);
  return name;
}

std::unique_ptr<Network> ClusterTransport::make_network(int channels, const std::string& purpose) const {
  auto network = context_->make_network(world_, rank(), channels, network_name() + "-" + purpose);
  network->keep(memory());
  return network;
}

void ClusterTransport::connect(const Waiting& waiting) {
  mirror_ = make_mirror();
  auto mail = make_network(RemoteMail::kChannels, "mail");
  mirror_->network().connect(mirror_->links(), waiting);
  if (!mail->links_on_demand()) {
    std::vector<Network::Link> links;
    for (const int other : remote_)
      for (int channel = 0; channel < RemoteMail::kChannels; ++channel) links.push_back({other, channel});
    mail->connect(links, waiting);
  }
  mail_ = make_mail(std::move(mail));
  hierarchy_ = make_hierarchy(waiting);
  // What is wrong with this group is not to end the waits of others.
  const auto look = [this] {
    try {
      hear_here();
    } catch (const Error& error) {
      mail_->network().abort(error.kind(), error.what());
    }
  };
  mail_entry_ = std::make_unique<MailList::Entry>(context_->mails, look);
}

MirrorRoutes ClusterTransport::routes_of(int rank) const {
  std::vector<int> hosts;
  for (int each = 0; each < size(); ++each) hosts.push_back(host_number(each));
  return mirror_routes(hosts, rank, context_->direct_hosts);
}

const std::map<int, MirrorRoutes>& ClusterTransport::host_routes() const {
  if (routes_.empty())
    for (int here = 0; here < size(); ++here)
      if (!is_elsewhere(here)) routes_.emplace(here, routes_of(here));
  return routes_;
}

std::unique_ptr<HostMirror> ClusterTransport::make_mirror() {
  MirrorRoutes routes = routes_of(rank());
  known_from_ = std::move(routes.answering);
  RoundMemory memory;
  memory.header = [this](int who, std::uint64_t round) { return header(who, round); };
  memory.staging = [this](int who, std::uint64_t round) { return staging(who, round); };
  memory.arrived = [this](int who, std::uint64_t round) { publish_arrival(who, round); };
  memory.knowledge.has_come = [this](int who, std::uint64_t round) { return has_come(who, round); };
  memory.knowledge.heard = [this](int who, std::uint64_t round) { publish_hearsay(who, round); };
  memory.staging_bytes = staging_bytes();
  auto network = make_network(HostMirror::channels(routes), "rounds");
  return std::make_unique<HostMirror>(std::move(network), routes, std::move(memory));
}

std::unique_ptr<RemoteMail> ClusterTransport::make_mail(std::unique_ptr<Network> network) {
  MailMemory memory;
  memory.header = [this](int source, int destination, std::uint64_t chunk) {
    return mailbox_header(source, destination, chunk);
  };
  memory.payload = [this](int source, int destination, std::uint64_t chunk) {
    return mailbox_payload(source, destination, chunk);
  };
  memory.came = [this](int source, std::uint64_t chunk) {
    mailbox(source, rank()).written.store(chunk, std::memory_order_release);
  };
  memory.was_read = [this](int destination, std::uint64_t chunk) {
    mailbox(rank(), destination).read.store(chunk, std::memory_order_release);
  };
  memory.chunk_bytes = mailbox_chunk_bytes();
  return std::make_unique<RemoteMail>(std::move(network), rank(), remote_, std::move(memory));
}

std::string ClusterTransport::host(int rank) const { return place(rank).host_name; }

std::int64_t ClusterTransport::process_id(int rank) const { return place(rank).process_id; }

// What has not come to this host would have come to one of its ranks from another host. If that one has come,
// too, it waits for somebody itself, or does nothing any more.
Missing ClusterTransport::missing(std::uint64_t round) const {
  std::set<int> late;
  std::set<int> behind;
  std::set<int> holding;
  const auto is_late = [&](int rank) { return !has_come(rank, round); };
  const auto add_late = [&](std::set<int>& to, const MirrorMessage& message) {
    std::ranges::copy_if(message.ranks, std::inserter(to, to.end()), is_late);
  };
  const auto look_at = [&](int here, const MirrorMessage& message) {
    const auto is_here = [&](int rank) { return arrived(rank) >= round; };
    if (std::ranges::all_of(message.ranks, is_here)) return;
    for (const int end : {here, message.peer}) {
      if (!is_late(end)) continue;
      late.insert(end);
      return add_late(behind, message);
    }
    if (std::ranges::any_of(message.ranks, is_late)) return add_late(late, message);
    holding.insert(message.peer);
    if (here != rank()) holding.insert(here);  // it may have stopped before it took the message in
  };
  for (const auto& [here, routes] : host_routes()) {
    if (is_late(here)) late.insert(here);
    for (const MirrorStep& step : routes.steps)
      for (const MirrorMessage& message : step.in) look_at(here, message);
  }
  for (const int rank : late) behind.erase(rank);
  return {{late.begin(), late.end()}, {behind.begin(), behind.end()}, {holding.begin(), holding.end()}};
}

// Of whom a rank only sends to it would notice nothing.
bool ClusterTransport::is_watched(int rank) const {
  if (!is_elsewhere(rank)) return true;
  for (const auto& [here, routes] : host_routes())
    for (const MirrorStep& step : routes.steps)
      if (std::ranges::find(step.in, rank, &MirrorMessage::peer) != step.in.end()) return true;
  return false;
}

void ClusterTransport::arrive(std::uint64_t round, std::size_t staged) {
  SharedTransport::arrive(round, staged);
  mirror_->post(rank(), round, staged);
}

WaitResult ClusterTransport::await_all(std::uint64_t round, const Waiting& waiting) {
  const auto look_around = [this, round] {
    mirror_->take_in();
    return find_lost(round);
  };
  // Warnings and errors tell who has come.
  const std::function<void(double)> stalled = [&](double waited) {
    mirror_->take_in();
    (*waiting.stalled)(waited);
  };
  const WaitResult mirrored = watch(waiting, look_around, [&](const Waiting& watched) {
    Waiting telling = watched;
    if (waiting.stalled != nullptr) telling.stalled = &stalled;
    const WaitResult result = mirror_->await(telling);
    if (!result.ok()) mirror_->take_in();
    return result;
  });
  if (!mirrored.ok()) return mirrored;
  // This rank has done its part: what is left is for others to bring. It goes on telling who has come.
  waiting.deadline.start();  // or the copy's clock alone would run
  const Clock::time_point start = Clock::now();
  const std::function<void()> tell = [&] {
    waiting.check_interrupt();
    mirror_->take_in();
    if (seconds_between(start, Clock::now()) >= HostMirror::kTurn) mirror_->tell();
  };
  Waiting telling = waiting;
  telling.interrupt = &tell;
  return listening(telling, [&](const Waiting& here) { return SharedTransport::await_all(round, here); });
}

WaitResult ClusterTransport::listening(const Waiting& waiting,
                                       const std::function<WaitResult(const Waiting&)>& wait) const {
  waiting.deadline.start();  // or the copy's clock alone would run
  const std::function<void()> look = [&] {
    waiting.check_interrupt();
    hear();
  };
  Waiting here = waiting;
  here.interrupt = &look;
  const WaitResult result = wait(here);
  if (!result.ok()) hear();
  return result;
}

WaitResult ClusterTransport::watch(const Waiting& waiting, const std::function<WaitResult()>& trouble,
                                   const std::function<WaitResult(const Waiting&)>& wait) {
  waiting.deadline.start();  // or the copy's clock alone would run
  const std::function<void()> look = [&] {
    waiting.check_interrupt();
    hear();
    if (SharedTransport::aborted(nullptr)) throw WaitEnded{{Outcome::kAborted}};
    if (const WaitResult found = trouble(); !found.ok()) throw WaitEnded{found};
  };
  Waiting watched = waiting;
  watched.interrupt = &look;
  WaitResult result;
  try {
    result = wait(watched);
  } catch (const WaitEnded& ended) {
    result = ended.result;
  }
  if (result.ok()) return result;
  hear();  // the end of a peer may come before what it has said
  return SharedTransport::aborted(nullptr) ? WaitResult{Outcome::kAborted} : result;
}

void ClusterTransport::hear() const {
  hear_here();
  context_->mails->look_now_and_then();
}

void ClusterTransport::hear_here() const {
  mirror_->look();
  mail_->look();
  AbortRecord record;
  if (mirror_->network().aborted(&record) || mail_->network().aborted(&record) ||
      (hierarchy_ != nullptr && hierarchy_->aborted(&record)))
    publish_abort(record.kind, record.origin, record.message);
  // The rank that told of it may be connected with none of those that this one is connected with.
  if (!SharedTransport::aborted(&record) || relayed_.exchange(true)) return;
  mirror_->network().relay(record);
  mail_->network().relay(record);
  if (hierarchy_ != nullptr) hierarchy_->relay(record);
}

void ClusterTransport::mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) {
  if (!is_elsewhere(destination)) return SharedTransport::mailbox_written(destination, chunk, bytes);
  mail_->send(destination, chunk, bytes);
}

void ClusterTransport::mailbox_read(int source, std::uint64_t chunk) {
  if (!is_elsewhere(source)) return SharedTransport::mailbox_read(source, chunk);
  mail_->answer(source, chunk);
}

WaitResult ClusterTransport::await_written(int source, std::uint64_t chunk, const Waiting& waiting) {
  if (!is_elsewhere(source))
    return listening(
        waiting, [&](const Waiting& here) { return SharedTransport::await_written(source, chunk, here); });
  const std::atomic<std::uint64_t>& written = mailbox(source, rank()).written;
  const auto ready = [&] { return written.load(std::memory_order_acquire) >= chunk; };
  return watch(
      waiting, [] { return WaitResult{}; },
      [&](const Waiting& watched) { return mail_->await_chunk(source, ready, watched); });
}

WaitResult ClusterTransport::await_read(int destination, std::uint64_t chunk, const Waiting& waiting) {
  if (!is_elsewhere(destination))
    return listening(
        waiting, [&](const Waiting& here) { return SharedTransport::await_read(destination, chunk, here); });
  const std::atomic<std::uint64_t>& read = mailbox(rank(), destination).read;
  const auto ready = [&] { return read.load(std::memory_order_acquire) >= chunk; };
  if (ready()) return {};
  return watch(
      waiting, [] { return WaitResult{}; },
      [&](const Waiting& watched) { return mail_->await_answer(destination, ready, watched); });
}

WaitResult ClusterTransport::await_sent(int destination, const Waiting& waiting) {
  if (!is_elsewhere(destination)) return {};
  return watch(
      waiting, [] { return WaitResult{}; },
      [&](const Waiting& watched) { return mail_->await_sent(destination, watched); });
}

std::unique_ptr<ClusterHierarchy> ClusterTransport::make_hierarchy(const Waiting& waiting) {
  constexpr std::uint64_t kTag = ~std::uint64_t{0};  // no subgroup of the user's has it
  // Messages go by pieces of it, which should not be small; a large setting is for other things.
  constexpr std::size_t kStagingFactor = 4;
  constexpr std::size_t kMostStaging = std::size_t{2} << 20;
  std::vector<int> here;
  for (int each = 0; each < size(); ++each)
    if (!is_elsewhere(each)) here.push_back(each);
  SharedTransportOptions shared = options();
  shared.staging_bytes = std::min(shared.staging_bytes * kStagingFactor, kMostStaging);
  auto host =
      std::make_shared<SharedTransport>(link(), world_ranks(here), subgroup_tag(kTag), shared, waiting);
  auto network = make_network(1, "plans");
  network->keep(host->memory());
  const auto watched = [this](const Waiting& limits, const std::function<WaitResult(const Waiting&)>& wait) {
    return watch(limits, [] { return WaitResult{}; }, wait);
  };
  return std::make_unique<ClusterHierarchy>(std::move(host), std::move(here), std::move(network), watched);
}

std::shared_ptr<Transport> ClusterTransport::subgroup(std::span<const int> chosen, std::uint64_t tag,
                                                      const Waiting& waiting) {
  std::vector<int> members;
  for (const int member : chosen) members.push_back(world_[static_cast<std::size_t>(member)]);
  const bool local =
      std::none_of(chosen.begin(), chosen.end(), [this](int member) { return is_elsewhere(member); });
  if (local) return SharedTransport::subgroup(chosen, tag, waiting);
  // The new group's networks do not know yet who has ended: somebody whom they cannot reach may still come.
  const std::function<void()> look = [&] {
    waiting.check_interrupt();
    if (aborted(nullptr)) throw WaitEnded{{Outcome::kAborted}};
    if (const WaitResult ended = find_ended(); !ended.ok()) throw WaitEnded{ended};
  };
  waiting.deadline.start();  // or the copy's clock alone would run
  Waiting watched = waiting;
  watched.interrupt = &look;
  try {
    return std::make_shared<ClusterTransport>(context_, std::move(members), subgroup_tag(tag), options(),
                                              watched);
  } catch (const Error& error) {
    // Who cannot be reached may have left because of an error that is told in this group, on its way still.
    for (int times = 0; error.kind() == ErrorKind::kPeerLost && times < kLooksForACause; ++times) {
      look();
      std::this_thread::sleep_for(kLookForACause);
    }
    throw;
  }
}

WaitResult ClusterTransport::find_ended() const {
  WaitResult found = find_ended_here();
  for (const int other : remote_) {
    for (const Network* network : {&mirror_->network(), &mail_->network()}) {
      const WaitResult ended = network->ended(other);
      if (!ended.ok() && (found.ok() || (found.peer_left && !ended.peer_left))) found = ended;
    }
  }
  return found;
}

// What other hosts have told counts as the first error, if there is any; but a network in which looking or
// telling fails is to keep no one here from learning of the error, nor those that other networks reach.
void ClusterTransport::abort(ErrorKind kind, const std::string& message) noexcept {
  const auto attempt = [](const auto& part) {
    try {
      part();
    } catch (...) {
    }
  };
  attempt([&] { aborted(nullptr); });
  SharedTransport::abort(kind, message);
  if (mirror_ != nullptr) attempt([&] { mirror_->network().abort(kind, message); });
  if (mail_ != nullptr) attempt([&] { mail_->network().abort(kind, message); });
  if (hierarchy_ != nullptr) attempt([&] { hierarchy_->abort(kind, message); });
}

bool ClusterTransport::aborted(AbortRecord* record) const {
  if (mirror_ != nullptr && mail_ != nullptr) hear();
  return SharedTransport::aborted(record);
}

void ClusterTransport::leave() {
  SharedTransport::leave();
  if (mirror_ != nullptr) mirror_->leave();
  if (mail_ != nullptr) mail_->leave();
  if (hierarchy_ != nullptr) hierarchy_->leave();
}

void ClusterTransport::abandon() {
  SharedTransport::abandon();
  mirror_->network().abandon();
  mail_->network().abandon();
  hierarchy_->abandon();
}

void ClusterTransport::wake() {
  SharedTransport::wake();
  mirror_->network().wake();
  mail_->network().wake();
  hierarchy_->wake();
}

}  // namespace multiring
