// The MoE layer: gate, dispatch, expert FFNs, combine, over the ranks of a world.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "switchyard/error.h"
#include "switchyard/layer_spec.h"
#include "switchyard/recording.h"
#include "switchyard/schedule.h"
#include "switchyard/tensor.h"
#include "switchyard/trace.h"
#include "switchyard/weights.h"
#include "switchyard/world.h"

namespace switchyard {

class LayerEngine;
class MoeLayer;
class Workspace;

// A point in the protocol, for step hooks.
struct ProtocolStep {
  enum class Kind : std::uint8_t {
    kGate,           // before a block of tokens is gated
    kPublishCounts,  // before a counts row is written to `peer`
    kPlan,           // after all counts rows have arrived
    kDispatch,       // before a chunk is written to `peer`
    kArrived,        // before the arrival of an expert's rows is signalled to `peer`
    kGemm1,
    kGemm2,
    kFinished,  // before the completion of an expert's rows is signalled to `peer`
    kCombine,
    kWait,  // again and again while a thread waits for `peer`, perhaps for other threads of its own
  };
  Kind kind{};
  int rank{};
  int peer{};
  std::uint64_t epoch{};
};

enum class Backend : std::uint8_t {
  kCpu,
  kCuda,  // one kernel launch per pass on an NVIDIA GPU of compute capability 9.0
};

// "cpu", "cuda".
const char* to_string(Backend backend);

// The treatment of slots with bad ids. An id is bad if it is below kNoExpert, or num_experts or
// more, or if it repeats an expert of the same token. In hash-routed layers all slots of a token
// whose id is outside the table are bad. (A slot of weight 0 whose expert another slot of the token
// names, too, is no expert's and not bad: routers write such slots for experts that do nothing.)
enum class BadIds : std::uint8_t {
  kRaise,  // Error{kInvalidArgument}: with kCpu before anything is sent, with kCuda from a later
           // call
  // The slot contributes nothing, like one with kNoExpert, and counts in ForwardStats::bad_slots.
  // For servers, which pad batches with rows of garbage.
  kSkip,
};

// Options that only layers with kCpu have. Others refuse all but the defaults.
struct CpuOptions {
  // Processor threads of this rank, the calling thread included. 0: the hardware threads of this
  // host divided by the ranks of the world, at least 1.
  int num_threads = 0;
};

// Options that only layers with kCuda have. Others refuse all but the defaults.
struct CudaOptions {
  // -1: the device that is current when the layer is made. Each rank that is a process chooses its
  // own, by the launcher's LOCAL_RANK, say. Kernels of a world's ranks wait for each other, so
  // ranks on the same device must leave SMs to the others (reserved_sms), and a few more.
  int device = -1;
  // Streaming multiprocessors that the layer leaves to other kernels.
  int reserved_sms = 0;
  // Launches cooperatively: all blocks of the kernel start at once, or none yet. Without it that
  // holds only while no other kernel runs on the device; otherwise blocks wait for each other up to
  // the deadline. Set it to false for profilers that cannot replay such launches of clusters: ncu
  // 2025.3 reports an illegal instruction.
  bool cooperative_launch = true;
  // Choices that replace the layer's own rules.
  Schedule schedule{};
};

// Records of a layer's passes, and faults that tests inject.
struct Diagnostics {
  // Record what every role does in each pass, for MoeLayer::trace(). With kCuda a second variant of
  // the kernel does so, which is compiled for some activations only; the other has no trace of it.
  bool trace = false;
  // kCuda only, and only with `trace`: fault injection.
  std::optional<SlowRole> slow_role{};
  // Called at every protocol step of this rank, from any of its threads. For fault injection and
  // tracing; an empty function costs one test per step. kCpu only.
  std::function<void(const ProtocolStep&)> on_step{};
  // The number of last passes whose rows of each expert are kept for MoeLayer::recording(). They
  // take a ring of recorded_steps * (16 + 4 bytes for each place of an expert), with kCuda in
  // device memory, which one warp of the kernel writes. 0: record nothing, at no cost; at most
  // 2^20. Ranks may differ.
  int recorded_steps = 0;
  // The layer's name in its recording: "layers.3". It may be any text, or none.
  std::string name{};
};

struct LayerOptions {
  Backend backend = Backend::kCpu;
  // Most tokens this rank may pass to one forward(). All ranks must declare the same number. With
  // kCpu it bounds address space, and memory is committed by what really arrives; with kCuda device
  // memory is allocated for what may arrive.
  int max_tokens = 8192;
  CpuOptions cpu{};
  CudaOptions cuda{};
  // Shared memory to work in, for the layers of a model, whose passes follow one another (see
  // workspace.h): a workspace of the same world and backend, which may end before this layer. It
  // needs room for this layer. The same on all ranks. Null: memory of its own. With kCuda stats()
  // count the passes of all layers in the memory, and `nan_*`, `bad_slots` and bytes are of the
  // last pass of any of them.
  const Workspace* workspace = nullptr;
  int workspace_slot = 0;  // 0 to slots - 1
  // Arithmetic and wire type: kBF16, kF32 or kF8E4M3. Empty: kF8E4M3 if the matrices of all experts
  // are FP8 and their scales are of blocks of multiples of 128 rows and columns (or of all of them)
  // or of whole rows; kBF16 for bf16, four-bit and other FP8 checkpoints, kF32 for fp16 and fp32
  // ones, or, with kCuda, kBF16 for these, too. Accumulation is always fp32.
  //
  // kF8E4M3 multiplies such weights as they are with activations, and with h, that are rounded to
  // bf16 and then quantised: for every 128 columns of a token, the last few included,
  //   scale = amax / 448,  code = f8_e4m3(x * 448 / amax),  with amax = max(2^-100, max |x|)
  // Experts' outputs are rounded to bf16. The gates see bf16. A NaN or an infinity in a group makes
  // the token's output NaN, and no other's. kBF16 and kF32 dequantise FP8 weights instead.
  //
  // Four-bit weights are dequantised, too, and multiplied with activations of the type computed in.
  // MXFP4 is exact in bf16; INT4 is rounded to it, as it is in PyTorch. kF8E4M3 multiplies MXFP4
  // with quantised activations, and refuses INT4. With kCuda a token, or its h, then has one scale
  // for all columns: amax is that of the row, and the matrix unit sums whole rows, with some
  // fourteen bits. (A shared expert of another type has its own kernels, and a scale for each 128.)
  std::optional<DType> compute{};
  // The treatment of bad ids among those given; ranks may differ.
  BadIds bad_ids = BadIds::kRaise;
  // Ids given that are num_experts or more mean none, as kNoExpert does, and are not bad.
  // Frameworks that assign experts to ranks themselves mark slots of other ranks' experts this way.
  bool large_ids_are_none = false;
  // Which experts each rank has, if not own_experts(). All ranks must give the same. The weights
  // are then those of places; ids, routing and statistics are of experts as ever. (A rank's rows of
  // an expert go to one place. On the CPU the bits of an output may depend on how many rows share
  // it.)
  ExpertPlacement placement{};
  // For ranks on several hosts; on one host it changes nothing. The same on all ranks. A host's
  // ranks sum the outputs that they have for one token of another host, times their weights, in
  // fp32 in the order of k, round the sum to the outputs' type (kBF16, or kF32 where that is
  // computed in), and send it as one row. That is at most one row for each token and host, so fewer
  // bytes between hosts. It changes bits: partial sums are rounded, and the token's rank adds them
  // in the order of their lowest k. Repetitions give the same bits, and so do other numbers of
  // ranks on these hosts if each host keeps its experts and tokens. Layers with kCuda do so
  // whatever this says (docs/hosts.md). There the sums of a token's own host are rounded, too, and
  // so is the shared expert's output.
  bool pre_sum_per_host = false;
  // Longest wait without a sign of progress from any rank, a year at most. Zero: the world's.
  std::chrono::milliseconds deadline{0};
  Diagnostics diagnostics{};
  // How long a rank waits for late ranks' counts before it computes rows that are here. Rows of
  // late ranks are computed when they come, which reads weights again. Outputs are the same bits
  // either way. At most a year; ranks may differ.
  //   kCpu   a thread that has nothing else to do waits, and then computes expert by expert. On
  //          processors whose products depend on a tile's height, rows wait for all counts. Empty:
  //          the time that reading an expert takes.
  //   kCuda  the rank waits, and then computes all rows that are here, and the others in a second
  //          round; a rank that is late itself computes first the rows of those that went ahead
  //          of it. Empty: passes of 2048 tokens or more (of this rank) wait for the time that a
  //          second round costs, from 20 us on, and others for all counts; so does a patience of
  //          `deadline` or more.
  std::optional<std::chrono::microseconds> patience{};
};

// One rank's share of a batch. T may differ between ranks and calls, and may be 0.
//
// With kCuda, every address here and in ForwardOutput is one of device memory, of the layer's
// device; the host never reads through the spans. The memory must stay as it is until the stream
// has passed this call, or for as long as a graph that captured it may be launched. Activations and
// outputs start at multiples of 16 bytes, and so do their rows, which do not stand in reverse.
struct ForwardInput {
  // [T, H], bf16, fp16 or fp32, rows contiguous (col_stride 1). Or, where LayerOptions::compute is
  // kF8E4M3, f8_e4m3 with a scale for every 128 columns of a token (scale_rows 1, scale_cols 128),
  // which are used as they are; then topk_ids or logits must be given, and the shared expert have
  // no gate. (With kCuda and MXFP4 codes are brought to the row's largest scale, which rounds again
  // those whose scale is no power of two of it, and those that become subnormal.)
  MatrixView activations{};
  // Either both empty (the layer's gate routes) or both [T, K]: expert ids in i32 or i64, distinct
  // within a token, kNoExpert for none (see LayerOptions::bad_ids, large_ids_are_none); and weights
  // in f32 or bf16, applied as given. Weights of slots without an expert may be anything.
  SlotView topk_ids{};
  SlotView topk_weights{};
  // [T, num_experts], f32 or bf16, rows contiguous (col_stride 1): router logits with the router's
  // bias in them. The layer's routing makes ids and weights of them in place of its own gate's,
  // which then does not run (a sigmoid-gated shared expert is weighed as ever). Empty: none. Not
  // together with topk_ids. The layer needs no router for it, but MoeWeights::correction_bias and
  // hash_table where its routing has them.
  MatrixView logits{};
  std::span<const std::int32_t> token_ids{};  // [T], hash-routed layers only
  // A promise that no rank has more tokens in this pass: T to LayerOptions::max_tokens, and the
  // same number on all ranks. 0: none is made. With it, passes over ranks of at most eight tokens
  // in all run a faster kernel on kCuda (docs/decisions/0048). It takes bf16 activations and
  // topk_ids, and makes bf16 outputs that are not accumulated: Error{kUnsupported} for others.
  // Ranks that promise different numbers wait for each other up to the deadline. Layers with a
  // shared expert, a capacity or weights on the input, and those of which a rank traces or records,
  // do not run that kernel. Passes of four-bit experts with few rows for each run the kernel for
  // low passes (Schedule::low_rows), whatever they take and make.
  int max_tokens_per_rank = 0;
  // kCuda only: a cudaStream_t; null: the default stream. Ranks on one device need streams that do
  // not wait for each other, which the default stream does.
  void* stream = nullptr;
};

// No output may overlap an input or another output, not even in part: Error{kInvalidArgument}.
// (Rows of one matrix may stand between those of another: two halves of the columns of one array.)
struct ForwardOutput {
  void* data = nullptr;         // [T, H]
  DType dtype = DType::kBF16;   // kBF16, kF16 or kF32
  std::int64_t row_stride = 0;  // in elements; 0: H
  // y = scale * (weighted sum of the experts' and the shared expert's outputs), in fp32, and with
  // `accumulate` y += that, in fp32, rounded once (twice where a shared expert stands beside
  // experts of four bits on a GPU): the memory then holds the other summand, numbers
  // of `dtype`, whatever the pass may be (a graph that captured it adds at every launch).
  float scale = 1;
  bool accumulate = false;
  // Where to put the routing that was used; each may be empty or [T, K]. Dropped slots have
  // kNoExpert.
  std::span<std::int32_t> topk_ids{};
  std::span<float> topk_weights{};
};

struct ForwardStats {
  std::uint64_t epoch = 0;
  std::int64_t tokens = 0;                        // of this rank
  std::vector<std::int64_t> tokens_per_expert{};  // [E], over all ranks
  std::int64_t dropped_slots = 0;                 // of this rank
  std::int64_t bad_slots = 0;   // of this rank, skipped; see LayerOptions::bad_ids
  std::int64_t nan_logits = 0;  // of this rank
  // Tokens of this rank with a NaN among their logits. Such an expert is never chosen, so these
  // tokens lose experts: all of them, if a NaN or an infinity among the activations is the cause.
  // Where routing is given there are no logits, and such a token's output is NaN instead.
  std::int64_t nan_tokens = 0;
  // Bytes this rank wrote into other ranks' heaps.
  std::uint64_t dispatch_bytes = 0;  // activations and row descriptors
  // Expert outputs. With LayerOptions::pre_sum_per_host: those for which another rank of this host
  // keeps the sum, and sums that this rank sent. On CPUs the number varies, because the rank with
  // the last of a token's outputs sends its sum.
  std::uint64_t combine_bytes = 0;
  std::uint64_t signal_bytes = 0;  // counts rows and flags
  // Bytes that an all-to-all would have sent from this rank, there and back, with every (rank,
  // expert) buffer padded to the fullest one. kCpu only.
  std::uint64_t padded_all_to_all_bytes = 0;
  std::uint64_t heap_bytes_used = 0;       // of this rank's heap, by this pass
  std::uint64_t heap_bytes_reserved = 0;   // address space at the declared maximum
  std::uint64_t workspace_bytes_used = 0;  // private: intermediate activations and scratch
  double gate_seconds = 0;                 // until this rank's counts were published
  double plan_seconds = 0;  // until every rank's counts were here and the plan was made
  double total_seconds = 0;
};

class MoeLayer {
 public:
  // Collective over the world. A rank need be given no more experts' weights than its own
  // (own_experts()). Their memory must outlive the layer (MoeWeights::owner is kept). With kCuda
  // they are copied to the device, in the compute type, unless they are there in that type:
  // matrices that form one array [E, I, H], [E, 2, I, H] (gate first), [E, I, 2, H] (gate and up
  // in turn) or [E, H, I], or parts of a larger one, with rows of multiples of 16 bytes, are used
  // where they are. Others are repacked by the device if they are in its memory, whatever their
  // strides: transposed ones ([E, H, 2 I] and [E, I, H]), say, and those with up first. With kCuda
  // scales, biases, the router and its tables are copied, too. With kCpu everything is used where
  // it is, but for a router of another type than the one that is multiplied: it is converted once.
  // refresh() reads anew what was copied; copies() tells whether anything was. Throws
  // Error{kInvalidArgument, kMissingTensor, kShapeMismatch, kDTypeMismatch} for a layer that cannot
  // be built, {kSpecMismatch} naming the rank and the field if the ranks disagree,
  // {kCapacityExceeded} if the heap cannot be had, {kUnsupported} for what the backend does not do
  // on this machine or in this build, or for FP8 weights with scales that FP8 arithmetic does not
  // take, TimeoutError if a rank does not come.
  MoeLayer(const World& world, const LayerSpec& spec, const MoeWeights& weights,
           const LayerOptions& options = {});
  // With kCpu it waits for nobody. With kCuda it waits until the device has done all that it was
  // given, for the layer's deadline at most: then it gives up the layer's passes, on all ranks, and
  // if the device does not end them within a second either, leaves the layer's memory allocated.
  // Must not run while graphs of this layer may be launched.
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  // One pass; every rank of the world must call it. With kCpu it returns when `output` is complete.
  // With kCuda it enqueues one kernel on `input.stream` (two where a shared expert stands beside
  // experts of four bits) and returns: it does not allocate, copy or synchronise, so it can be
  // captured in a CUDA graph, and a graph may be launched again with other contents in the same
  // memory. Passes of one layer must follow one another: on one stream, or on streams that wait for
  // each other. The same input gives the same bits, on every repetition
  // and however many ranks share the experts (with kCuda, where routing is given, because what its
  // gate sums up in parts depends on how many tokens a rank has, and where Schedule::small_tokens
  // is 0, because passes of few tokens on one GPU add in another order); in FP8, activations and
  // what quantising them as above makes of them give the same bits, too. Throws
  // Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch, kCapacityExceeded} before anything is
  // sent if the input is unusable; TimeoutError{kTimeout} if a rank did not do its part within the
  // deadline, TimeoutError{kAborted} if another rank noticed first. After either the layer is dead
  // and every later call throws again; the world lives, and can make another.
  //
  // With kCuda the ids given for tokens and experts are checked on the device. An error found
  // there, a bad id (Error{kInvalidArgument}, unless LayerOptions::bad_ids is kSkip; such slots are
  // skipped either way) or a wait that passed its deadline (TimeoutError), is thrown by the first
  // forward() or stats() that starts after the pass ended. The CUDA context stays usable. A pass of
  // one rank ends when all ranks have enqueued theirs: a thread that plays several ranks, or two
  // threads with ranks on one device, must not call what waits for the device (cudaFree, say) in
  // between.
  void forward(const ForwardInput& input, const ForwardOutput& output);

  // Lays out anew what the layer copied of the weights that it was given, from the same memory, in
  // which the caller has changed it: with kCuda matrices, scales, biases, router, correction bias
  // and the shared expert's gate, but not the hash table; with kCpu a converted router. Memory that
  // is used in place needs no call; a pass that runs while it changes may see either. It does next
  // to nothing where copies() is false. With kCuda it is enqueued on `stream`, for passes that
  // follow there, and if all that was copied is in the device's memory it can be captured in a
  // graph (it is a few kernels); what is in host memory is read before it returns. With kCpu it is
  // done when it returns, and `stream` is null. Not collective. Throws Error{kUnsupported} with
  // kCuda where the layer holds no weights any more, since all were copied from host memory and
  // MoeWeights::owner was let go.
  void refresh(void* stream = nullptr);

  // Whether anything that the layer was given was copied or laid out anew, so that changes in place
  // need refresh().
  bool copies() const;

  // Points the layer at other arrays of the same shapes and types, as if it had been made with
  // them; passes that were enqueued before still read the old ones, and graphs that captured
  // forward() or refresh() always do: capture them anew. With kCuda it may wait for the device and
  // may not be captured. Not collective, but ranks that share experts' weights in pieces change
  // them between the same two passes. Throws what the constructor throws for weights that do not
  // fit, and Error{kDTypeMismatch} for those that would be computed in another type; the layer is
  // then as it was.
  void rebind(const MoeWeights& weights);
  // Also gives experts other places, of which there are as many as before. Collective: all ranks
  // call it between the same two passes, with the same placement; Error{kSpecMismatch} if they
  // differ.
  void rebind(const MoeWeights& weights, const ExpertPlacement& placement);

  // Throws what forward() would throw for passes that have ended, and does not wait if there is
  // nothing to throw. Call this when you replay graphs instead of calling forward(). Do not use the
  // output of a pass that was given up, nor of passes enqueued behind it.
  void check();

  // Statistics of the last pass; zeros before the first. With kCuda it waits for all work given to
  // the device, so it may not be captured, nor called while another rank on the device waits for
  // this one's next pass. Passes launched by a graph count; times and used heap bytes are not
  // known.
  const ForwardStats& stats() const;

  // The routing of the last passes, over all ranks' tokens. With kCuda it waits like stats(), and
  // passes launched by a graph count. Throws Error{kInvalidArgument} without
  // Diagnostics::recorded_steps, and what forward() throws for a failed pass.
  Recording recording() const;

  // The events of this rank's last pass. Waits like stats(). Throws Error{kInvalidArgument} without
  // Diagnostics::trace, and what forward() throws for a failed pass.
  PassTrace trace() const;

  const LayerSpec& spec() const;
  Backend backend() const;
  DType compute() const;
  int num_threads() const;  // kCuda: 0
  // Private memory of this rank beside weights and heap: with kCuda what was allocated on the
  // device when the layer was made, or the workspace's memory that it works in, with kCpu
  // address space that is committed as it is used.
  std::uint64_t workspace_bytes() const;

 private:
  LayerEngine& engine() const;  // of this process

  std::unique_ptr<LayerEngine> engine_;
};

}  // namespace switchyard
