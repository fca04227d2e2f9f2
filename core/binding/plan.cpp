#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/job_settings.h"
#include "binding/gil.h"
#include "binding/py_communicator.h"
#include "collective/plan/algorithm_table.h"
#include "collective/plan/device_row.h"
#include "collective/plan/tuning.h"
#include "topology/cost_model.h"
#include "topology/traffic.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

DType parse_dtype(const std::string& name) {
  for (int number = 0; number < kDTypeCount; ++number)
    if (name == dtype_name(static_cast<DType>(number))) return static_cast<DType>(number);
  throw Error(ErrorKind::kUsage, "there is no dtype '" + name + "'");
}

/// PlanOptions with names in place of enumerations.
struct PlanRequest {
  std::size_t count = 0;
  std::string dtype = "float32";
  std::string mode;
  int channels = PlanOptions{}.channels;
  std::size_t segment = 0;
  std::string order = order_name(PlanOptions{}.order);
  std::string collective = collective_name(PlanOptions{}.collective);
  std::string nccl = nccl_scope_name(JobSettings{}.nccl);

  PlanOptions options(int ranks) const {
    PlanOptions made = collective_options(parse_collective(collective), count, ranks);
    made.dtype = parse_dtype(dtype);
    if (!mode.empty()) made.mode = parse_mode(mode);
    made.channels = channels;
    made.segment = segment;
    made.order = adds(made.collective) ? parse_order(order) : Order::kAny;
    return made;
  }
  DeviceRequest on_devices(bool has_mode, bool is_rounded) const {
    const DType type = parse_dtype(dtype);
    return {.collective = parse_collective(collective),
            .bytes = count * dtype_size(type),
            .dtype = type,
            .order = parse_order(order),
            .nccl = parse_nccl_scope(nccl),
            .has_mode = has_mode,
            .is_rounded = is_rounded && type == DType::kFloat32};
  }
};

Cluster cluster(const std::vector<int>& ranks_per_host, const std::vector<Interface>& interfaces,
                double memory_rate, double memory_latency, double memory_rewriting, bool round_robin,
                const std::string& links) {
  Cluster made = make_cluster(ranks_per_host, interfaces, {memory_rate, memory_latency, memory_rewriting},
                              round_robin ? Placement::kRoundRobin : Placement::kBlocks);
  made.links = parse_host_links(links);
  return made;
}

std::vector<std::vector<int>> ranks_of_hosts(const Cluster& cluster) {
  std::vector<std::vector<int>> ranks;
  for (const Host& host : cluster.hosts) ranks.push_back(host.ranks);
  return ranks;
}

/// What a step moves, or all steps together.
std::pair<std::vector<LinkTraffic>, std::vector<RankTraffic>> traffic(const Plan& plan,
                                                                      std::optional<std::size_t> index) {
  if (index && *index >= plan.steps().size())
    throw Error(ErrorKind::kUsage, "the plan has " + std::to_string(plan.steps().size()) + " steps");
  const Traffic moved = index ? step_traffic(plan, plan.steps()[*index]) : total_traffic(plan);
  return {moved.links(), moved.ranks()};
}

void bind_cluster(py::module_& module) {
  py::class_<Interface>(module, "Interface", "A network interface: bytes per second, latency in seconds.")
      .def(py::init<double, double>(), py::arg("bytes_per_second"), py::arg("latency"))
      .def_readonly("bytes_per_second", &Interface::bytes_per_second)
      .def_readonly("latency", &Interface::latency);
  py::class_<Cluster>(module, "Cluster", "Hosts that are alike but for their numbers of ranks.")
      .def(py::init(&cluster), py::arg("ranks_per_host"), py::arg("interfaces"), py::kw_only(),
           py::arg("memory_rate") = HostMemory{}.bytes_per_second,
           py::arg("memory_latency") = HostMemory{}.latency,
           py::arg("memory_rewriting") = HostMemory{}.rewriting, py::arg("round_robin") = false,
           py::arg("host_links") = host_links_name(HostLinks::kSwitch))
      .def_property_readonly("size", &Cluster::size)
      .def_property_readonly("aligned", &Cluster::aligned)
      .def_property_readonly("ranks", &ranks_of_hosts, "The ranks of each host.");
}

void bind_steps(py::module_& module) {
  py::class_<Group>(module, "Group", "Ranks that reduce or share elements [begin, end) with each other.")
      .def_readonly("ranks", &Group::ranks)
      .def_readonly("channel", &Group::channel)
      .def_property_readonly("begin", [](const Group& group) { return group.range.begin; })
      .def_property_readonly("end", [](const Group& group) { return group.range.end; });
  py::class_<Step>(module, "Step", "What all groups of a dimension do at the same time.")
      .def_property_readonly("phase", [](const Step& step) { return phase_name(step.phase); })
      .def_property_readonly("algorithm", [](const Step& step) { return traits_of(step.algorithm).name; })
      .def_readonly("dimension", &Step::dimension)
      .def_readonly("groups", &Step::groups)
      .def_property_readonly("hops", &hop_count)
      .def_property_readonly("parts", &Step::most_parts);
  py::class_<LinkTraffic>(module, "LinkTraffic", "Bytes and messages through one interface of a host.")
      .def_readonly("host", &LinkTraffic::host)
      .def_readonly("interface", &LinkTraffic::interface)
      .def_readonly("sent", &LinkTraffic::sent)
      .def_readonly("received", &LinkTraffic::received)
      .def_readonly("messages", &LinkTraffic::messages);
  py::class_<RankTraffic>(module, "RankTraffic", "Bytes and messages that a rank sends.")
      .def_readonly("sent", &RankTraffic::sent)
      .def_readonly("sent_in_memory", &RankTraffic::sent_in_memory)
      .def_readonly("messages", &RankTraffic::messages);
}

void bind_plans(py::module_& module) {
  py::class_<PlanRequest>(module, "PlanRequest", "What a plan is for, and what of it is forced.")
      .def(py::init<>())
      .def_readwrite("count", &PlanRequest::count)
      .def_readwrite("dtype", &PlanRequest::dtype)
      .def_readwrite("mode", &PlanRequest::mode)
      .def_readwrite("channels", &PlanRequest::channels)
      .def_readwrite("segment", &PlanRequest::segment)
      .def_readwrite("order", &PlanRequest::order)
      .def_readwrite("collective", &PlanRequest::collective)
      .def_readwrite("nccl", &PlanRequest::nccl);
  py::class_<Channel>(module, "Channel", "One way through the network that all hosts take together.")
      .def_readonly("interface", &Channel::interface)
      .def_readonly("bytes_per_second", &Channel::bytes_per_second);
  py::class_<Plan>(module, "Plan", "Steps of one collective.")
      .def(py::init([](const Cluster& cluster, const PlanRequest& request) {
             return Plan(cluster, request.options(cluster.size()));
           }),
           py::arg("cluster"), py::arg("request"))
      .def_property_readonly("mode", [](const Plan& plan) { return format_mode(plan.mode()); })
      .def_property_readonly(
          "sizes",
          [](const Plan& plan) {
            std::vector<int> sizes;
            for (const Dimension& dimension : plan.mode()) sizes.push_back(dimension.size);
            return sizes;
          },
          "Of the dimensions, from the inside out.")
      .def_property_readonly("count", &Plan::count)
      .def_property_readonly("order", [](const Plan& plan) { return order_name(plan.order()); })
      .def_property_readonly("element_bytes", &Plan::element_bytes)
      .def_property_readonly("partial_bytes", &Plan::partial_bytes)
      .def_property_readonly("parts_across_hosts", &Plan::parts_across_hosts)
      .def_property_readonly("channels", &Plan::channels)
      .def_property_readonly(
          "steps",
          [](const Plan& plan) { return std::vector<Step>(plan.steps().begin(), plan.steps().end()); })
      .def("traffic", &traffic, py::arg("step") = py::none(),
           "Traffic of all interfaces and of all ranks in one step, or in all of them.");
}

void bind_costs(py::module_& module) {
  py::class_<LinkCost>(module, "LinkCost", "Seconds of latency, and bytes per second of a host.")
      .def(py::init<double, double>(), py::arg("latency"), py::arg("bytes_per_second"))
      .def_readonly("latency", &LinkCost::latency)
      .def_readonly("bytes_per_second", &LinkCost::bytes_per_second);
  py::class_<CostModel>(module, "CostModel", "What a plan costs besides the speeds of its cluster.")
      .def(py::init<>())
      .def_readwrite("call_seconds", &CostModel::call_seconds)
      .def_readwrite("message_seconds", &CostModel::message_seconds)
      .def_readwrite("interface_message_seconds", &CostModel::interface_message_seconds)
      .def_readwrite("shared_message_seconds", &CostModel::shared_message_seconds)
      .def_readwrite("shared_bytes_per_second", &CostModel::shared_bytes_per_second)
      .def_readwrite("reduction_bytes_per_second", &CostModel::reduction_bytes_per_second)
      .def_readwrite("dimensions", &CostModel::dimensions);
  module.def(
      "predict_steps",
      [](const Plan& plan, const CostModel& model) {
        std::vector<double> seconds;
        for (const StepCost& step : predict_steps(plan, model).steps)
          seconds.push_back(PlanCost{{step}}.seconds(1));
        return seconds;
      },
      py::arg("plan"), py::arg("model"), "Predicted seconds of each step in which chunks go whole.");
  module.def("plan_limit", &limit_seconds, py::arg("plan"), py::arg("model"),
             "Seconds that no plan that treats all hosts alike can go below.");
  py::class_<AlgorithmRow>(module, "AlgorithmRow", "An algorithm of a collective, and its costs.")
      .def_readonly("name", &AlgorithmRow::name)
      .def_readonly("excluded", &AlgorithmRow::excluded)
      .def_readonly("needs", &AlgorithmRow::needs)
      .def_readonly("hops", &AlgorithmRow::hops)
      .def_readonly("rank_bytes", &AlgorithmRow::rank_bytes)
      .def_readonly("segments", &AlgorithmRow::segments)
      .def_readonly("seconds", &AlgorithmRow::seconds)
      .def_readonly("is_compared", &AlgorithmRow::is_compared)
      .def_readonly("is_chosen", &AlgorithmRow::is_chosen);
  module.def(
      "choose_algorithm",
      [](const Cluster& cluster, const PlanRequest& request, const CostModel& model,
         std::size_t staging_bytes) {
        AlgorithmTable::Choice choice =
            AlgorithmTable(cluster, model, staging_bytes).choice(request.options(cluster.size()));
        return std::pair(std::move(choice.row), std::move(choice.plan));
      },
      py::arg("cluster"), py::arg("request"), py::arg("model"),
      py::arg("staging_bytes") = JobSettings{}.staging_bytes, py::call_guard<GilRelease>(),
      "The row of the algorithm that a job on several hosts takes, and its plan; None: it is none.");
  module.def(
      "algorithm_table",
      [](const Cluster& cluster, const PlanRequest& request, const CostModel& model,
         std::size_t staging_bytes) {
        return AlgorithmTable(cluster, model, staging_bytes)
            .rows(request.options(cluster.size()), parse_nccl_scope(request.nccl));
      },
      py::arg("cluster"), py::arg("request"), py::arg("model"),
      py::arg("staging_bytes") = JobSettings{}.staging_bytes, py::call_guard<GilRelease>(),
      "All algorithms of a collective across hosts, or of one that adds within one.");
  module.def(
      "device_row",
      [](const Cluster& cluster, const PlanRequest& request, bool has_mode, bool is_rounded) {
        return device_row(cluster, request.on_devices(has_mode, is_rounded));
      },
      py::arg("cluster"), py::arg("request"), py::arg("has_mode"), py::arg("is_rounded"),
      "The row of what a job on several hosts runs for arrays on devices, a device for each rank.");
  module.def(
      "assumed_memory",
      [](int ranks, bool oversubscribed) {
        const HostMemory memory = host_memory(ranks, oversubscribed);
        return std::tuple(memory.bytes_per_second, memory.latency, memory.rewriting);
      },
      py::arg("ranks"), py::arg("oversubscribed"),
      "The memory of a single host of so many ranks, as the arguments of Cluster.");
  module.def(
      "check_mode",
      [](const std::string& text) { require_runs(parse_algorithm(text), Collective::kAllreduce); },
      py::arg("text"), "Raises UsageError for what MULTIRING_MODE cannot be, whatever ranks there are.");
  module.def(
      "check_tuning", [](const std::string& text) { Tuning::parse(text); }, py::arg("text"),
      "Raises UsageError with the number of the line that is wrong.");
  module.def(
      "collective_names",
      [] {
        std::vector<std::string> names;
        for (const Collective each : kAllCollectives) names.emplace_back(collective_name(each));
        return names;
      },
      "The collectives that have a table of algorithms.");
  module.def(
      "has_plans", [](const std::string& collective) { return has_plans(parse_collective(collective)); },
      py::arg("collective"), "Whether plans are among its algorithms.");
  module.def(
      "adds", [](const std::string& collective) { return adds(parse_collective(collective)); },
      py::arg("collective"), "Whether a collective adds anything.");
  module.def("algorithm_letters", [] { return algorithm_letters(); }, "What the letters of a mode mean.");
  module.def(
      "documented_algorithms",
      [] {
        std::vector<std::map<std::string, std::string>> found;
        for (const Algorithm algorithm : kAllAlgorithms) {
          const AlgorithmTraits& traits = traits_of(algorithm);
          found.push_back({{"letter", std::string(1, traits.letter)},
                           {"name", traits.name},
                           {"description", traits.description},
                           {"hops", traits.hops_text},
                           {"bytes", traits.bytes_text},
                           {"good_for", traits.good_for},
                           {"canonical", traits.by_chunk == ByChunk::kOrder ? "no" : "yes"}});
        }
        return found;
      },
      "What the documentation says of each algorithm of a mode.");
  module.def(
      "dtype_size", [](const std::string& name) { return dtype_size(parse_dtype(name)); }, py::arg("dtype"),
      "Bytes of an element of a type by its name.");
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_cluster(module);
  bind_steps(module);
  bind_plans(module);
  bind_costs(module);
}

}  // namespace multiring::binding
