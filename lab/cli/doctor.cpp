// `switchyard doctor`: what this machine can do, and whether it does it right.
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>

#include "base/json.h"
#include "base/mapping.h"
#include "base/names.h"
#include "base/plural.h"
#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/format.h"
#include "cli/source.h"
#include "common/host_memory.h"
#include "cpu/kernels.h"
#include "cpu/tile_gemm.h"
#include "fabric/launch.h"
#include "gpu/device.h"
#include "gpu/peer_link.h"
#include "layer/compute.h"
#include "machine/host.h"
#include "machine/host_rates.h"
#include "network/network.h"
#include "run/verify.h"

namespace switchyard::cli {
namespace {

constexpr double kMeasureSeconds = 0.2;

// A fact about the machine, or a check that passed or failed. A failed check has a remedy.
struct Finding {
  std::string name;
  std::string text;
  Json value;
  std::optional<bool> passed;  // empty: not a check
  std::string remedy;
};

Finding fact(std::string name, std::string text, Json value) {
  return {std::move(name), std::move(text), std::move(value), std::nullopt, ""};
}

Finding check(std::string name, bool passed, const std::string& text, std::string remedy) {
  return {std::move(name), text, text, passed, passed ? "" : std::move(remedy)};
}

double gemm_rate(DType dtype) {
  constexpr machine::TileProduct kTypical{256, 128, 2048, 128};
  return machine::measure_gemm_rate({kTypical}, dtype, machine::hardware_threads(),
                                    kMeasureSeconds);
}

double read_rate() {
  // Larger than the last-level cache of most machines, but never more than memory can spare.
  const std::uint64_t bytes = std::min(std::uint64_t{1} << 30, host_memory().available / 4);
  const Mapping mapping = Mapping::anonymous(bytes);
  // Huge pages make this memory like that of generated weights. A failure does no harm.
  ::madvise(mapping.data(), bytes, MADV_HUGEPAGE);
  // Every page is written once, because pages that were never written all share one page of zeros.
  constexpr std::size_t kPage = 4096;
  for (std::size_t at = 0; at < bytes; at += kPage) mapping.data()[at] = std::byte{1};
  const machine::ByteRange range(mapping.data(), bytes);
  return machine::measure_read_rate(std::span(&range, 1), machine::hardware_threads(),
                                    kMeasureSeconds);
}

void find_machine(std::vector<Finding>& findings) {
  const HostMemory memory_found = host_memory();
  const auto bytes = [](std::uint64_t b) { return format_bytes(static_cast<double>(b)); };
  findings.push_back(fact("cpu", machine::cpu_name(), machine::cpu_name()));
  findings.push_back(
      fact("threads", fmt::format("{}", machine::hardware_threads()), machine::hardware_threads()));
  findings.push_back(fact("gemm_isa", cpu::gemm_instruction_set(), cpu::gemm_instruction_set()));
  findings.push_back(fact("kernel_isa", cpu::kernels().name, cpu::kernels().name));
  findings.push_back(fact("native_bf16",
                          cpu::has_native_bf16() ? "yes" : "no: bf16 layers multiply in fp32",
                          cpu::has_native_bf16()));
  findings.push_back(fact(
      "memory",
      fmt::format("{} of {} available", bytes(memory_found.available), bytes(memory_found.total)),
      {{"total_bytes", memory_found.total}, {"available_bytes", memory_found.available}}));
  const std::string policy = machine::huge_page_policy();
  findings.push_back(fact("huge_pages",
                          policy == "never" ? "never; 'madvise' in /sys/kernel/mm/"
                                              "transparent_hugepage/enabled makes weights faster"
                                            : policy,
                          policy));
  const std::string network = network::describe();
  findings.push_back(fact("network", network, network));
}

std::string cuda_version(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

Finding describe_gpu(int device) {
  const gpu::DeviceInfo d = gpu::device_info(device);
  const auto bytes = [](std::uint64_t b) { return format_bytes(static_cast<double>(b)); };
  const std::string capability = fmt::format("{}.{}", d.compute_major, d.compute_minor);
  const std::string fit =
      d.runs_our_kernels() ? "" : "; not used: the kernels are compiled for capability 9.0";
  return fact(
      fmt::format("gpu_{}", device),
      fmt::format("{}, {}, capability {}, {} of {} free, driver CUDA {}, runtime {}, dmabuf {}{}",
                  d.name, plural(d.num_sms, "SM"), capability, bytes(d.free_bytes),
                  bytes(d.memory_bytes), cuda_version(d.driver_version),
                  cuda_version(d.runtime_version), d.exports_dmabuf ? "yes" : "no", fit),
      {{"name", d.name},
       {"num_sms", d.num_sms},
       {"compute_capability", capability},
       {"memory_bytes", d.memory_bytes},
       {"free_bytes", d.free_bytes},
       {"l2_bytes", d.l2_bytes},
       {"max_shared_bytes_per_block", d.max_shared_bytes},
       {"driver_version", cuda_version(d.driver_version)},
       {"runtime_version", cuda_version(d.runtime_version)},
       {"dmabuf", d.exports_dmabuf},
       {"usable", d.runs_our_kernels()}});
}

// Describes the link by which ranks on two GPUs write into each other's memory.
Finding describe_link(int from, int to) {
  const gpu::PeerLink link = gpu::peer_link(from, to);
  const double rate = link.reachable ? gpu::peer_write_rate(from, to) : 0;
  return fact(fmt::format("gpu_{}_to_{}", from, to),
              link.reachable
                  ? fmt::format("{}, written at {}/s{}", link.kind, format_bytes(rate),
                                link.atomics ? "" : ", without atomics")
                  : fmt::format("{}, no peer access: ranks cannot share them", link.kind),
              {{"kind", link.kind},
               {"peer_access", link.reachable},
               {"native_atomics", link.atomics},
               {"write_bytes_per_second", rate}});
}

// Says why there is no GPU to list.
std::string no_gpu() {
  const std::string sign = machine::nvidia_device();
  if (sign.empty()) return "none";
  return sign + (gpu::built_with_cuda()
                     ? ", but CUDA finds no device: is the driver running, and new enough?"
                     : "; the CUDA engine is not part of this build");
}

void find_gpus(std::vector<Finding>& findings) {
  const int count = gpu::device_count();
  if (count == 0) findings.push_back(fact("gpu", no_gpu(), machine::nvidia_device()));
  for (int device = 0; device < count; ++device) findings.push_back(describe_gpu(device));
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (from != to) findings.push_back(describe_link(from, to));
    }
  }
}

// Returns whether the current GPU can run layers.
bool gpu_is_usable() {
  return gpu::device_count() > 0 && gpu::device_info(gpu::current_device()).runs_our_kernels();
}

void find_rates(std::vector<Finding>& findings) {
  const double bandwidth = read_rate();
  const double bf16 = gemm_rate(cpu::gemm_dtype(DType::kBF16));
  const double f32 = gemm_rate(DType::kF32);
  findings.push_back(fact("memory_read", format_quantity(bandwidth, "B/s"), bandwidth));
  findings.push_back(fact("gemm_bf16", format_quantity(bf16, "FLOP/s"), bf16));
  findings.push_back(fact("gemm_f32", format_quantity(f32, "FLOP/s"), f32));
}

// Runs `find`, and turns an exception into a failed check. So the other findings are still shown.
void attempt(void (*find)(std::vector<Finding>&), const char* name, const char* remedy,
             std::vector<Finding>& findings) {
  try {
    find(findings);
  } catch (const std::exception& error) {
    findings.push_back(check(name, false, error.what(), remedy));
  }
}

constexpr const char* kTinyModel = "olmoe";
constexpr int kTinyExperts = 8;
constexpr int kTinySize = 64;
constexpr int kTinyTokens = 48;

// Runs a small layer as `switchyard run` does, and compares the result with the reference.
Finding check_layer(const std::string& name, Backend backend, DType compute, int num_ranks) {
  const char* const remedy = "report this with the output of 'switchyard doctor --json'";
  try {
    SourceOptions source_options{.model = kTinyModel, .dtype = compute};
    source_options.overrides.num_experts = kTinyExperts;
    source_options.overrides.hidden = kTinySize;
    source_options.overrides.intermediate = kTinySize;
    const Source source = load_source(source_options, 1, false);
    const run::Batch batch = run::make_batch({.tokens = kTinyTokens}, source, value_type(compute));
    const run::RunResult result = run::run_as_threads(
        source, batch, {.backend = backend, .ranks = num_ranks, .compute = compute, .repeat = 1});
    const run::Verification v = run::verify(source, batch, result, compute);
    return check(name, v.ok(),
                 fmt::format("{}, error {:.1e} with a bound of {:.1e}", plural(num_ranks, "rank"),
                             v.error, v.bound),
                 remedy);
  } catch (const std::exception& error) {
    return check(name, false, error.what(), remedy);
  }
}

Finding check_threads(DType compute) {
  return check_layer(fmt::format("thread_ranks_{}", short_name(compute)), Backend::kCpu, compute,
                     2);
}

void check_gpus(std::vector<Finding>& findings) {
  if (!gpu_is_usable()) return;
  for (const DType compute : {DType::kBF16, DType::kF8E4M3}) {
    const char* const name = short_name(compute);
    findings.push_back(check_layer(fmt::format("cuda_{}", name), Backend::kCuda, compute, 1));
    if (gpu::device_count() < 2) continue;
    findings.push_back(check_layer(fmt::format("cuda_ranks_{}", name), Backend::kCuda, compute, 2));
  }
}

Finding check_sockets() {
  const std::string problem = machine::abstract_socket_problem();
  return check("abstract_sockets", problem.empty(), problem.empty() ? "ok" : problem,
               "allow Unix sockets in this sandbox, or use ranks that are threads (--ranks)");
}

Finding check_processes() {
  const char* const remedy =
      "see the messages above; ranks that are threads (--ranks) do without processes";
  try {
    const auto text = [](int number) { return std::to_string(number); };
    LaunchOptions options{.num_ranks = 2};
    options.command = {machine::own_executable(),
                       "run",
                       "--model",
                       kTinyModel,
                       "--experts",
                       text(kTinyExperts),
                       "--hidden",
                       text(kTinySize),
                       "--intermediate",
                       text(kTinySize),
                       "--tokens",
                       text(kTinyTokens),
                       "--repeat",
                       "1",
                       "--verify",
                       "--quiet",
                       "--backend",
                       "cpu"};
    options.deadline = std::chrono::seconds(60);
    const int exit_code = launch(options);
    return check("process_ranks", exit_code == 0,
                 exit_code == 0 ? "2 ranks, verified"
                                : fmt::format("2 ranks failed with exit code {}", exit_code),
                 remedy);
  } catch (const std::exception& error) {
    return check("process_ranks", false, error.what(), remedy);
  }
}

bool all_passed(const std::vector<Finding>& findings) {
  return std::all_of(findings.begin(), findings.end(),
                     [](const Finding& f) { return f.passed.value_or(true); });
}

void print_text(const std::vector<Finding>& findings) {
  const Palette palette = Palette::for_output(STDOUT_FILENO);
  for (const Finding& f : findings) {
    std::string name = f.name;
    std::replace(name.begin(), name.end(), '_', ' ');
    const std::string mark = !f.passed   ? "      "
                             : *f.passed ? palette.green("ok    ")
                                         : palette.red("FAIL  ");
    fmt::print("{}{}{}\n", mark, palette.dim(fmt::format("{:<20}", name)), f.text);
    if (!f.remedy.empty()) fmt::print("{:<26}remedy: {}\n", "", f.remedy);
  }
}

void print_json(const std::vector<Finding>& findings) {
  Json json;
  json["ok"] = all_passed(findings);
  json["machine"] = Json::object();
  json["checks"] = Json::array();
  for (const Finding& f : findings) {
    if (!f.passed) {
      json["machine"][f.name] = f.value;
    } else {
      json["checks"].push_back(
          {{"name", f.name}, {"ok", *f.passed}, {"detail", f.text}, {"remedy", f.remedy}});
    }
  }
  fmt::print("{}\n", json.dump({.indent = 2, .ascii = true}));
}

int doctor(bool json) {
  std::vector<Finding> findings;
  find_machine(findings);
  attempt(find_gpus, "gpus", "see that the driver runs: does nvidia-smi list them?", findings);
  attempt(find_rates, "rates", "free some memory, or allow more of it (ulimit -v)", findings);
  findings.push_back(check_threads(DType::kF32));
  findings.push_back(check_threads(DType::kBF16));
  findings.push_back(check_threads(DType::kF8E4M3));
  check_gpus(findings);
  findings.push_back(check_sockets());
  findings.push_back(check_processes());
  json ? print_json(findings) : print_text(findings);
  return all_passed(findings) ? kExitOk : kExitVerification;
}

}  // namespace

void add_doctor(CommandLine& line) {
  Command& command =
      line.add_command("doctor", "Tell what this machine can do, and check that it does");
  const auto json = std::make_shared<bool>(false);
  command.add_flag("--json", *json, "As JSON");
  command.footer("Exits with 1 if a check fails, and says what to do about it.");
  command.runs([json] { return doctor(*json); });
}

}  // namespace switchyard::cli
