// Dispatch and combine alone: tokens to the ranks of their experts, and results back. Use them in
// layers whose experts are computed by something else: GroupedGemm (grouped_gemm.h), or kernels of
// your own. MoeLayer (layer.h) does all of it in one kernel.
//
//   Exchange exchange(world, spec);
//   ExchangeHandle handle = exchange.make_handle();
//   exchange.dispatch({x, ids, weights}, received, handle);
//   ... experts: received.rows to y, with received.ends ...
//   exchange.combine({y}, {out.data()}, handle);
//
// Dispatch and combine are also there as send and receive. A send returns when this rank's part has
// been sent (kCpu) or enqueued (kCuda), and waits for nobody, so other work goes between:
//
//   exchange.dispatch_send({x, ids, weights}, handle);
//   ... the shared expert, say ...
//   exchange.dispatch_recv(received, handle);
//
// It uses one-sided stores and numbered flags: no collective, no barrier between calls, no reset. A
// token crosses once to each rank that has experts of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "switchyard/layer.h"
#include "switchyard/operators.h"
#include "switchyard/tensor.h"
#include "switchyard/trace.h"
#include "switchyard/weights.h"
#include "switchyard/world.h"

namespace switchyard {

class ExchangeEngine;
struct ExchangeMaker;

// The rank that multiplies a row of results by its slot's weight in combine.
enum class CombineWeights : std::uint8_t {
  // The token's rank, as it sums: out = sum over k of weight * row, in fp32.
  kByReceiver,
  // The expert's rank, before it sends: weight * row, in fp32, rounded to ExchangeSpec::combine.
  kBySender,
  kNone,  // an unweighted sum: the rows have their weights already, or need none
};
// "receiver", "sender", "none".
const char* to_string(CombineWeights weights);

// The same on all ranks.
struct ExchangeSpec {
  int hidden = 0;       // H: elements of a token, 1 to 2^23; kCuda: a multiple of 8, FP8 of 16
  int num_experts = 0;  // E, over all ranks, 1 to 4096; kCuda: up to 1024 places
  int top_k = 0;        // K: slots of a token, 1 to 32
  // Most tokens that a rank may pass to one dispatch. With kCpu it bounds address space, and memory
  // is committed by what really arrives; with kCuda device memory is allocated for it. All that
  // ranks can send to one rank, in the layout below, must be rows that an i32 can number.
  int max_tokens = 0;
  // The type of tokens on their way and of received rows.
  //   kBF16, kF16, kF32  the input has this type and is copied
  //   kF8E4M3            the input is f8_e4m3 with a scale for every 128 columns, used as it is; or
  //                      bf16, f16 or f32, which is quantised before it travels, as layers that
  //                      compute in kF8E4M3 do (LayerOptions::compute)
  DType dispatch = DType::kBF16;
  // The type of the experts' results, also on their way back: kBF16, kF16 or kF32.
  DType combine = DType::kBF16;
  // The layout of received rows and of results, by this rank's experts, as in GroupedInput. An
  // expert's rows are sorted by rank, then by token. A padded layout of size 0 has room for all
  // tokens of all ranks, max_tokens * world.
  RowLayout layout{};
  CombineWeights weights = CombineWeights::kByReceiver;
  // The expert's rank sums the rows that it has of one token, in fp32 in the order of k, rounds the
  // sum to `combine`, and sends it as one row. That is at most one row for each token and rank, so
  // fewer bytes. It changes bits: partial sums are rounded, and the token's rank adds them in the
  // order of their lowest k. Not with CombineWeights::kByReceiver.
  bool pre_sum = false;
  // For ranks on several hosts; on one host it changes nothing. A host's ranks sum the rows that
  // they have of one token of another host, in fp32 in the order of k, round the sum to `combine`,
  // and send it as one row. That is at most one row for each token and host, so fewer bytes between
  // hosts; within a host rows travel as `pre_sum` says. It changes bits, as pre_sum does;
  // repetitions give the same bits. Not with CombineWeights::kByReceiver.
  bool pre_sum_per_host = false;
  // Which experts each rank has, if not own_experts(). Rows are then sorted by place (weights.h):
  // this rank's experts are own_experts(places, rank, ranks).
  ExpertPlacement placement{};
  // Ids that are num_experts or more mean none, as kNoExpert does. Otherwise they are bad ids: see
  // DispatchInput::ids.
  bool large_ids_are_none = false;
};

struct ExchangeOptions {
  Backend backend = Backend::kCpu;
  int num_threads = 0;  // kCpu only; as in CpuOptions
  int device = -1;      // kCuda only; as in CudaOptions
  // kCuda only. The most SMs that a call uses for rows; 0: all. One block of a call waits for other
  // ranks as long as it takes. It needs few resources, so ranks may share a device whatever they
  // use. In a process with several ranks on a device, set CUDA_DEVICE_MAX_CONNECTIONS to 32 before
  // the first of them: each rank's stream needs a queue of its own, or its sends can stand behind
  // another's receive.
  int max_sms = 0;
  // Longest wait without a sign of progress from any rank, a year at most. Zero: the world's. Time
  // between calls, for experts say, is no progress: it must be shorter.
  std::chrono::milliseconds deadline{0};
  // Record what was done in each call, for Exchange::trace().
  bool trace = false;
  // As in LayerOptions, at kPublishCounts, kDispatch, kArrived, kFinished, kCombine and kWait.
  // kCpu only.
  std::function<void(const ProtocolStep&)> on_step{};
};

// One rank's tokens. T may differ between ranks and calls, and may be 0. With kCuda every address
// here and below is of memory of the exchange's device, and the memory must stay as it is until the
// stream has passed the call. Rows there start at multiples of 16 bytes.
struct DispatchInput {
  // [T, H], rows contiguous (col_stride 1), of a type that ExchangeSpec::dispatch takes. FP8 with
  // scale_rows 1 and scale_cols 128.
  MatrixView tokens{};
  // [T, K], i32 or i64: experts, distinct within a token; kNoExpert is none. Other ids, and an
  // expert that a token names twice, are Error{kInvalidArgument}: with kCpu before anything is
  // sent, with kCuda from a later call, where such a slot, or the later of two, is none. See
  // ExchangeSpec::large_ids_are_none.
  SlotView ids{};
  // [T, K], f32 or bf16; empty: all 1.
  SlotView weights{};
  // Uses the handle's ids and weights again, for other tokens: see ExchangeHandle. `ids` and
  // `weights` are then empty.
  bool reuse = false;
  void* stream = nullptr;  // kCuda only: a cudaStream_t
};

// The origin of a received row.
struct RowOrigin {
  std::int32_t rank{};
  std::int32_t token{};  // of that rank
  std::int32_t k{};      // the slot of the token
};

// The arrays for the n received rows. Each but `rows` may be null. Memory without a row stays as it
// was. The arrays may not overlap each other, nor, in dispatch(), the input:
// Error{kInvalidArgument}. (dispatch_recv() may overwrite the input of dispatch_send().)
struct DispatchOutput {
  void* rows = nullptr;         // [capacity, H] of ExchangeSpec::dispatch, in its layout
  std::int64_t capacity = 0;    // rows that there is room for; see Exchange::rows_needed()
  std::int64_t row_stride = 0;  // in elements; 0: H
  // [capacity, ceil(H / 128)]; needed where rows are FP8.
  float* scales = nullptr;
  std::int64_t scale_stride = 0;  // in elements; 0: ceil(H / 128)
  // [own experts]: rows of this rank's experts 0 to e together, as GroupedInput::ends.
  std::int32_t* ends = nullptr;
  std::int32_t* counts = nullptr;    // [own experts]: rows of each
  std::int32_t* num_rows = nullptr;  // [1]: n
  RowOrigin* origins = nullptr;      // [capacity], in the layout
  float* weights = nullptr;          // [capacity], in packed order, as GroupedOutput::weights
  void* stream = nullptr;            // kCuda only: a cudaStream_t
};

struct CombineInput {
  // [rows, H] of ExchangeSpec::combine, rows contiguous (col_stride 1), in the layout and the order
  // of the rows that were received. Gaps between them are not read.
  MatrixView rows{};
  void* stream = nullptr;  // kCuda only: a cudaStream_t
};

// y[t] = scale * sum over k of [weight(t, k) *] row(t, k), in fp32, in the order of k; slots
// without an expert are left out. With `accumulate` y[t] + that, rounded once.
struct CombineOutput {
  void* data = nullptr;         // [T, H]; in combine() it may not overlap the rows that are sent
  DType dtype = DType::kBF16;   // kBF16, kF16 or kF32
  std::int64_t row_stride = 0;  // in elements; 0: H
  float scale = 1;
  bool accumulate = false;
  void* stream = nullptr;  // kCuda only: a cudaStream_t
};

// The record of one dispatch that its combine needs: where each slot went, and the origin of each
// received row. A handle belongs to one Exchange. A dispatch replaces its contents, unless
// DispatchInput::reuse is set: then as many other tokens go to the same experts with the same
// weights, in the same rows. Nothing is counted then, and neither ids nor weights travel. All ranks
// reuse their handles of the same earlier dispatch, or none does: Error{kSpecMismatch}. Combine may
// use a handle any number of times. Movable. With kCuda it must outlive the calls enqueued with it.
class ExchangeHandle {
 public:
  class State;

  ExchangeHandle();  // of no exchange
  ~ExchangeHandle();
  ExchangeHandle(ExchangeHandle&&) noexcept;
  ExchangeHandle& operator=(ExchangeHandle&&) noexcept;

  bool empty() const { return state_ == nullptr; }
  // Whether a dispatch was received with it.
  bool dispatched() const;
  // This rank's tokens in the dispatch that made the contents.
  std::int64_t tokens() const;

 private:
  friend class Exchange;
  explicit ExchangeHandle(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

// Statistics of this rank's last dispatch and last combine. With kCuda the bytes that depend on the
// ids are counted on the device.
struct ExchangeStats {
  std::uint64_t dispatches = 0;  // sent since the exchange was made
  std::uint64_t combines = 0;
  std::int64_t tokens = 0;         // of this rank
  std::int64_t tokens_sent = 0;    // to other ranks: one for each token and rank
  std::int64_t rows_received = 0;  // n
  // Rows sent to other ranks by combine. With ExchangeSpec::pre_sum_per_host: rows for which
  // another rank of this host keeps the sum, and sums that this rank sent. The number varies,
  // because the rank with the last of a token's rows sends its sum.
  std::int64_t rows_returned = 0;
  // Bytes this rank wrote into other ranks' heaps.
  std::uint64_t dispatch_bytes = 0;  // tokens and descriptions of rows
  std::uint64_t combine_bytes = 0;   // results
  std::uint64_t signal_bytes = 0;    // counts and flags, of both
  std::uint64_t heap_bytes_reserved = 0;
};

// All ranks of the world make the same calls in the same order; their own tokens, rows and outputs
// differ. At most one dispatch and one combine are on their way: after dispatch_send() comes
// dispatch_recv() with the same handle before the next dispatch_send(), and so for combine, while
// calls of the other kind may be in between. The calls of one exchange follow one another: with
// kCuda on one stream, or on streams that wait for each other.
//
// All calls throw Error{kInvalidArgument, kShapeMismatch, kDTypeMismatch} for arguments that make
// no sense, before anything is sent or stored. The call can then be repeated. They throw
// TimeoutError{kTimeout} if a rank did not do its part within the deadline, and
// TimeoutError{kAborted} if another rank noticed first. Then the exchange is dead, and every later
// call throws again; the world lives, and can make another.
//
// With kCuda calls enqueue kernels and return: they neither allocate nor synchronise, so a graph
// can capture them. An error found on the device (a bad id, too little room, a deadline) is thrown
// by the first call that starts after it was found, or by check().
class Exchange {
 public:
  // Collective. Throws Error{kInvalidArgument} for a spec or options that make no sense,
  // {kSpecMismatch} naming the rank and the field if the ranks disagree, {kCapacityExceeded} if
  // memory cannot be had, {kUnsupported} for what the backend does not do on this machine or in
  // this build, TimeoutError if a rank does not come.
  Exchange(const World& world, const ExchangeSpec& spec, const ExchangeOptions& options = {});
  // Waits as MoeLayer's destructor does. Must not run while graphs of this exchange may be
  // launched.
  ~Exchange();
  Exchange(Exchange&&) noexcept;
  Exchange& operator=(Exchange&&) noexcept;

  // With kCuda it allocates device memory for the most there can be. Not collective.
  ExchangeHandle make_handle() const;

  // Also throws Error{kCapacityExceeded} for more than max_tokens tokens, and
  // Error{kInvalidArgument} for bad ids (kCuda: from a later call; see DispatchInput::ids). The
  // input's memory may be changed when it returns (kCuda: when the stream has passed it).
  void dispatch_send(const DispatchInput& input, ExchangeHandle& handle);
  // Waits for all ranks' tokens and puts the rows where `output` says. Throws
  // Error{kCapacityExceeded} if the rows do not have room, before anything is stored. (kCuda: from
  // a later call; rows without room are not stored.) A call that was refused, for that or for any
  // other output that it cannot take, changes nothing: it can be made again with a right one.
  void dispatch_recv(const DispatchOutput& output, ExchangeHandle& handle);
  // Sends and receives in one call. Input and output are checked before anything is sent. Only the
  // room for the rows (kCpu) is known later: after that error call dispatch_recv() with more. With
  // many tokens it is faster than the two calls: with kCuda rows are stored while more are sent, if
  // the rank has its device for itself and both are on one stream. Those blocks wait for other
  // ranks for 100 us at most.
  void dispatch(const DispatchInput& input, const DispatchOutput& output, ExchangeHandle& handle);

  // Rows that dispatch_recv() needs: the most that may arrive; and, for callers that allocate
  // exactly, those of the dispatch that was sent with the handle. The latter waits on the host for
  // the counts of all ranks, with kCuda behind the stream's earlier work; it cannot be captured. A
  // padded layout needs the same in both.
  std::int64_t rows_needed() const;
  std::int64_t rows_needed(ExchangeHandle& handle, void* stream = nullptr);

  // Sends results of the rows that were received with the handle to the ranks of their tokens. The
  // input's memory may be changed as after dispatch_send().
  void combine_send(const CombineInput& input, ExchangeHandle& handle);
  // Waits for the results of this rank's tokens and sums them. A call that was refused changes
  // nothing: it can be made again with a right output.
  void combine_recv(const CombineOutput& output, ExchangeHandle& handle);
  // Sends and receives in one call. Input and output are checked before anything is sent.
  void combine(const CombineInput& input, const CombineOutput& output, ExchangeHandle& handle);

  // Throws what the next call would throw if an earlier one has failed; otherwise does nothing.
  // Call this when you replay graphs.
  void check();
  // With kCuda it knows the calls that have ended on the device: synchronise their stream first. It
  // may not be captured.
  const ExchangeStats& stats() const;
  // The events of this rank's last dispatch and of the combines since. With kCuda: of that dispatch
  // and the last combine, an event for each block of a kernel, of calls that have ended on the
  // device. With GPUs on several hosts the events are the host's. Throws Error{kInvalidArgument}
  // without ExchangeOptions::trace.
  PassTrace trace() const;

  const ExchangeSpec& spec() const;  // with the room of padded experts
  Backend backend() const;
  int num_threads() const;         // kCuda: 0
  ExpertRange own_places() const;  // this rank's experts, or places with a placement

 private:
  friend struct ExchangeMaker;
  explicit Exchange(std::unique_ptr<ExchangeEngine> engine);
  ExchangeEngine& engine() const;  // of this process

  std::unique_ptr<ExchangeEngine> engine_;
};

}  // namespace switchyard
