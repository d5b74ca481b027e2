// The C interface: worlds, layers and forward passes for other languages, over a shared library
// whose functions stay the same while C++ compilers and standard libraries change. It does what the
// C++ headers do (layer.h, workspace.h, world.h, routing.h), which say more about every field.
//
// Rules that hold everywhere:
//
// - A function that can fail returns a sy_status. Anything but SY_OK leaves its outputs as they
//   were, except that sy_layer_forward() may have written part of the output. sy_last_error() then
//   says what was wrong, on the same thread. No C++ exception leaves this library.
// - A handle is made by one function and ended by its sy_..._destroy(), which takes the address of
//   the handle and sets it to null: ending it twice does nothing. A layer keeps its world alive,
//   and the memory of its workspace. A handle that another thread is using in a call is not
//   destroyed but left behind. After fork() the child may only end handles that it inherited.
// - A struct that is passed to this library starts with struct_size, which must be sizeof the
//   struct as the caller was compiled with it. The initialisers below (SY_..._INIT) set it. Later
//   versions append fields: a shorter struct means defaults for them. A longer one is accepted if
//   what this library does not know is all zeros, and refused with SY_UNSUPPORTED otherwise; so is
//   a reserved field that is not 0. sy_tensor, sy_matrices, sy_activation, sy_row_layout,
//   sy_tune_model and sy_tune_configuration are parts of other structs and, as sy_peer_map, never
//   grow.
// - The library never owns memory that a sy_tensor points to. Weights must outlive the layer.
// - One thread at a time may use a handle, but for sy_world_abort(); different handles may be used
//   at the same time. All ranks of a world must call its collective functions.
#ifndef SWITCHYARD_C_H_
#define SWITCHYARD_C_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SY_API __attribute__((visibility("default")))
#else
#define SY_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ------------------------------------------------------------------------------------- version

// Increased when a caller compiled with this header could not use an older library, or the other
// way round. Compare with sy_abi_version() when the library is loaded.
#define SY_ABI_VERSION 2u
SY_API uint32_t sy_abi_version(void);
// The version of Switchyard, e.g. "0.2.0".
SY_API const char* sy_version(void);
// 1 if this build has the GPU engine.
SY_API int32_t sy_has_cuda(void);

// -------------------------------------------------------------------------------------- errors

typedef int32_t sy_status;
enum {
  SY_OK = 0,
  SY_INVALID_ARGUMENT = 1,   // a value passed by the caller is out of its domain
  SY_INVALID_CONFIG = 2,     // config.json is malformed, inconsistent or of an unknown family
  SY_INVALID_FILE = 3,       // a file is truncated, or its header disagrees with its contents
  SY_MISSING_TENSOR = 4,     // a tensor that the layer needs was not given
  SY_SHAPE_MISMATCH = 5,     // a tensor was given, but not with the shape that is needed
  SY_DTYPE_MISMATCH = 6,     // a tensor was given, but not with a dtype that can be used there
  SY_UNSUPPORTED = 7,        // understood, but not implemented by this build or on this machine
  SY_CAPACITY_EXCEEDED = 8,  // more tokens than the declared maximum, or not enough memory
  SY_SPEC_MISMATCH = 9,      // the ranks of a world disagree on the layer, the limits or the call
  SY_TIMEOUT = 10,           // a wait passed its deadline; see sy_error
  SY_ABORTED = 11,           // another rank failed first; see sy_error
  SY_SYSTEM = 12,            // an operating system call failed
  SY_OUT_OF_MEMORY = 13,     // std::bad_alloc
  SY_INTERNAL = 14,          // an exception of no other kind: a fault of this library
  SY_INTERRUPTED = 15        // the caller's check ended the call: see sy_set_interrupt_check()
};
// "ok", "invalid_argument", ...; "unknown" for other numbers. Static text.
SY_API const char* sy_status_name(sy_status status);

// The last failure on this thread. The texts stay valid until the thread's next failure.
typedef struct sy_error {
  uint32_t struct_size;
  sy_status code;  // SY_OK: nothing has failed on this thread yet
  // One line in UTF-8, without control characters. It names the value and the remedy. At most 4095
  // bytes.
  const char* message;
  // With SY_TIMEOUT and SY_ABORTED, if wait_failed: what the first waiter whose deadline passed
  // saw. Otherwise -1, "" and 0.
  int32_t wait_failed;
  int32_t waiter_rank;  // whose deadline passed
  int32_t peer_rank;    // the rank it waited for
  uint32_t reserved;    // 0
  const char* phase;    // "slots", "counts", "dispatch", "combine", ...
  uint64_t epoch;       // forward passes since the layer was made, or calls of an exchange, from 1
  uint64_t slot;        // which counter of that phase
  uint64_t expected;    // the counter value waited for
  uint64_t observed;    // the value last seen
  double waited_seconds;  // how long
} sy_error;
#define SY_ERROR_INIT \
  { .struct_size = sizeof(sy_error) }
// Fills `out`. Succeeds unless `out` is null or its struct_size is wrong.
SY_API sy_status sy_last_error(sy_error* out);

// ---------------------------------------------------------------------------------- interrupts

// Returns other than 0 if the call that waits is to end.
typedef int32_t (*sy_interrupt_check)(void);
// From now on, calls that `thread` (a pthread_t) makes and that wait for other ranks on the host
// ask `check` every 50 ms, on that thread; null: no call asks. If the answer is not 0, the call
// fails with SY_INTERRUPTED, and its world ends for all ranks, which get SY_ABORTED with the rank
// that was interrupted. The check may call sy_world_abort() and sy_..._destroy(). Calls that may
// wait for other ranks fail there with SY_INVALID_ARGUMENT.
SY_API sy_status sy_set_interrupt_check(sy_interrupt_check check, uint64_t thread);

// Functions of the C interface of CPython, by which a call that waits runs the handlers of signals.
typedef struct sy_python {
  uint32_t struct_size;
  uint32_t reserved;                                           // 0
  int32_t (*ensure)(void);                                     // PyGILState_Ensure
  void (*release)(int32_t state);                              // PyGILState_Release
  int32_t (*check_signals)(void);                              // PyErr_CheckSignals
  void (*fetch)(void** type, void** value, void** traceback);  // PyErr_Fetch
  void (*restore)(void* type, void* value, void* traceback);   // PyErr_Restore
} sy_python;
#define SY_PYTHON_INIT \
  { .struct_size = sizeof(sy_python) }
// Sets the check that runs them, for calls of Python's main thread. An exception of a handler ends
// the call and is kept until sy_raise_in_python().
SY_API sy_status sy_watch_python_signals(const sy_python* python, uint64_t main_thread);
// Raises the exception that was kept, if there is one. For callers that hold the lock of the
// interpreter and look for exceptions afterwards.
SY_API sy_status sy_raise_in_python(void);

// ------------------------------------------------------------------------------------- tensors

typedef int32_t sy_dtype;
enum {
  SY_DTYPE_NONE = 0,  // as a choice: left to the library
  SY_F32 = 1,
  SY_F16 = 2,
  SY_BF16 = 3,
  SY_F8_E4M3 = 4,
  SY_I32 = 5,
  SY_I64 = 6,
  SY_U8 = 7,
  SY_F8_E8M0 = 8,  // 2^(code - 127): scales only
  // Weights only. Two elements share a byte: the even column has the low half. Shapes and strides
  // count elements.
  SY_F4_E2M1 = 9,  // MXFP4
  SY_U4 = 10       // INT4: 0 to 15
};

typedef int32_t sy_device_type;
enum {
  SY_CPU = 1,  // numbers as in DLPack
  SY_CUDA = 2
};

// A tensor in the caller's memory. Strides are in elements and may be any number, also 0 or
// negative where the memory is the host's. Absent: ndim 0.
#define SY_MAX_DIMS 4
typedef struct sy_tensor {
  void* data;  // the first element; may be null if there are no elements
  sy_dtype dtype;
  int32_t ndim;
  sy_device_type device_type;
  int32_t device_id;  // 0 for SY_CPU
  int64_t shape[SY_MAX_DIMS];
  int64_t strides[SY_MAX_DIMS];
} sy_tensor;

// --------------------------------------------------------------------------------------- world

typedef struct sy_world sy_world;

typedef struct sy_world_options {
  uint32_t struct_size;
  uint32_t reserved;        // 0
  double deadline_seconds;  // longest time any rank waits for another, at start and in a pass
  // Process worlds: a name that all ranks of this world share and no other world on this host uses
  // at the same time. Null: derived from the launcher's environment.
  const char* rendezvous;
  // Ranks on several hosts: at most `network_window` chunks of `network_chunk_bytes` of dispatch,
  // and as many of combine, are on their way from one rank to another. The same on all ranks. Their
  // product should exceed the network's bandwidth times its round-trip time. SY_INVALID_ARGUMENT
  // naming a value that makes no sense, SY_SPEC_MISMATCH where ranks differ.
  uint32_t network_chunk_bytes;  // 2 KiB to 1 GiB, a multiple of 64; 0: 256 KiB
  uint32_t network_window;       // 1 to 32768; 0: 4
  // With a rendezvous tcp://...: the secret that ranks prove to each other, at least 16 bytes, the
  // same on all ranks. Null or empty: that of SWITCHYARD_SECRET_FILE or SWITCHYARD_SECRET.
  const char* secret;
} sy_world_options;
#define SY_WORLD_OPTIONS_INIT \
  { .struct_size = sizeof(sy_world_options), .deadline_seconds = 30.0 }

// `options` may be null. A world of one.
SY_API sy_status sy_world_single(const sy_world_options* options, sy_world** out);
// Writes `size` handles to out[0 .. size); out[r] is for the thread that plays rank r.
SY_API sy_status sy_world_threads(int32_t size, const sy_world_options* options, sy_world** out);
// This process as rank `rank` of `size` processes on this host. Collective. SY_TIMEOUT names the
// ranks that did not arrive.
SY_API sy_status sy_world_processes(int32_t rank, int32_t size, const sy_world_options* options,
                                    sy_world** out);
// Rank and size from the launcher's environment (RANK and WORLD_SIZE, Open MPI's, PMI's, SLURM's);
// a world of one where there is none. Ranks on several hosts need a shared secret and a build with
// libfabric (SY_UNSUPPORTED without): docs/hosts.md.
SY_API sy_status sy_world_from_environment(const sy_world_options* options, sy_world** out);

typedef struct sy_world_info {
  uint32_t struct_size;
  int32_t rank;
  int32_t size;
  uint32_t reserved;  // 0
  double deadline_seconds;
  // "threads", "shared memory", or "2 hosts, libfabric ..."; it lasts as long as the world.
  const char* fabric;
} sy_world_info;
#define SY_WORLD_INFO_INIT \
  { .struct_size = sizeof(sy_world_info) }
SY_API sy_status sy_world_get_info(const sy_world* world, sy_world_info* out);

// Collective, for start-up and tests.
SY_API sy_status sy_world_barrier(sy_world* world);
// Ends the world for all its ranks: every wait, now and later, fails with SY_ABORTED. Any thread
// may call it, also while others of this rank wait or work. It does not wait.
SY_API sy_status sy_world_abort(sy_world* world);
SY_API sy_status sy_world_destroy(sy_world** world);

// --------------------------------------------------------------------------------------- layer

typedef int32_t sy_activation_kind;
enum {
  SY_SILU = 0,       // v * sigmoid(alpha v)
  SY_GELU = 1,       // 0.5 v (1 + erf(v / sqrt 2))
  SY_GELU_TANH = 2,  // 0.5 v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3)))
  SY_RELU = 3,       // max(v, 0)
  SY_RELU2 = 4,      // max(v, 0)^2
  SY_IDENTITY = 5,
  SY_SITU = 6  // alpha tanh(v / alpha) sigmoid(v), gated only
};

// Gated: h = f(min(g, limit)) * (clamp(u, -limit, limit) + up_bias), or of SY_SITU
// h = f(g) * (limit tanh(u / limit) + up_bias). Plain: h = f(u).
typedef struct sy_activation {
  sy_activation_kind kind;
  int32_t gated;
  float alpha;  // SY_SILU and SY_SITU only
  float limit;  // INFINITY: none
  float up_bias;
  uint32_t reserved;  // 0
} sy_activation;

typedef int32_t sy_routing_method;
enum { SY_TOP_K = 0, SY_SPARSE_MIXER = 1, SY_HASH = 2 };
typedef int32_t sy_score;
enum { SY_SOFTMAX = 0, SY_SIGMOID = 1, SY_SQRT_SOFTPLUS = 2 };
typedef int32_t sy_group_score;
enum { SY_GROUP_MAX = 0, SY_GROUP_SUM_TOP_TWO = 1 };

// How logits become expert ids and weights: RoutingSpec in layer_spec.h.
typedef struct sy_routing {
  uint32_t struct_size;
  sy_routing_method method;
  sy_score score;
  int32_t top_k_before_score;
  int32_t renormalize;
  float renormalize_epsilon;
  int32_t has_correction_bias;
  int32_t num_groups;
  int32_t top_k_groups;
  sy_group_score group_score;
  float scale;
  float jitter_eps;
} sy_routing;
#define SY_ROUTING_INIT                                                     \
  {                                                                         \
    .struct_size = sizeof(sy_routing), .num_groups = 1, .top_k_groups = 1,  \
    .group_score = SY_GROUP_SUM_TOP_TWO, .scale = 1.0f, .jitter_eps = 0.01f \
  }

typedef int32_t sy_capacity_rule;
// An expert keeps ceil(factor K T / E) slots of a rank's T tokens, or ceil(factor T / E).
enum { SY_CAPACITY_OF_SLOTS = 0, SY_CAPACITY_OF_TOKENS = 1 };

// The definition of a layer: LayerSpec in layer_spec.h.
typedef struct sy_layer_spec {
  uint32_t struct_size;
  int32_t hidden;        // H
  int32_t intermediate;  // I, of one routed expert
  int32_t num_experts;   // E, over all ranks
  int32_t top_k;         // K
  int32_t router_bias;
  int32_t expert_bias;
  int32_t shared_intermediate;  // 0: no shared expert
  int32_t shared_sigmoid_gate;
  int32_t weight_on_input;
  float capacity_factor;           // 0: nothing is dropped
  sy_capacity_rule capacity_rule;  // 0: SY_CAPACITY_OF_SLOTS
  sy_activation activation;
  // Needed only where the layer has a router or is given logits; null: the defaults.
  const sy_routing* routing;
} sy_layer_spec;
#define SY_LAYER_SPEC_INIT                                \
  {                                                       \
    .struct_size = sizeof(sy_layer_spec), .activation = { \
      .gated = 1,                                         \
      .alpha = 1.0f,                                      \
      .limit = INFINITY                                   \
    }                                                     \
  }

// One projection of several experts. Where weight is FP8, the value of element (e, r, c) is its
// code times scale[e][r / scale_rows][c / scale_cols].
typedef struct sy_matrices {
  sy_tensor weight;  // [n, rows, cols], f32, f16, bf16 or f8_e4m3; any strides, so that transposed
                     // and interleaved weights need no copy. Or f4_e2m1 or u4, whose columns are
                     // contiguous, with even strides between rows and experts
  sy_tensor scale;   // [n, ceil(rows / scale_rows), ceil(cols / scale_cols)], f32 or f8_e8m0.
                     // Four-bit weights have theirs read in place, contiguous in a row, with
                     // scale_rows 1: f8_e8m0 and scale_cols 32 for f4_e2m1; f32, bf16 or f16 and
                     // scale_cols 32 or 128 for u4
  sy_tensor bias;    // [n, rows], f32, f16 or bf16
  int64_t scale_rows;
  int64_t scale_cols;
} sy_matrices;

// n is the number of all experts, or of those that this rank has (sy_own_experts()).
typedef struct sy_layer_weights {
  uint32_t struct_size;
  uint32_t reserved;           // 0
  sy_matrices gate, up, down;  // [n, I, H], [n, I, H], [n, H, I]; gate absent for plain FFNs
  sy_tensor router;            // [E, H]; absent where routing is given with each call
  sy_tensor router_bias;       // [E]
  sy_tensor correction_bias;   // [E]
  sy_tensor hash_table;        // [vocabulary, K], i32 or i64
  // The shared expert: as above with n = 1.
  sy_matrices shared_gate, shared_up, shared_down;
  sy_tensor shared_sigmoid;  // [H]
  // [places], i32 in host memory, contiguous: the expert at each place. Places are numbered over
  // all ranks; then n is of places, of all or of this rank's (sy_own_experts() of them). Absent:
  // expert e is at place e, and nowhere else.
  sy_tensor placement;
  // Zero points of u4 weights: [n, rows, cols / scale_cols], u8, 0 to 15, contiguous in a row, with
  // the row stride of the scales. Absent: 8.
  sy_tensor gate_zero, up_zero, down_zero;
} sy_layer_weights;
#define SY_LAYER_WEIGHTS_INIT \
  { .struct_size = sizeof(sy_layer_weights) }

// The experts [begin, end) that rank `rank` of `num_ranks` has.
SY_API sy_status sy_own_experts(int32_t num_experts, int32_t rank, int32_t num_ranks,
                                int32_t* begin, int32_t* end);

typedef int32_t sy_bad_ids;
enum {
  SY_BAD_IDS_RAISE = 0,  // an id that no expert has, or named twice for a token, is an error
  SY_BAD_IDS_SKIP = 1    // such a slot contributes nothing and counts in sy_stats.bad_slots
};

typedef struct sy_workspace sy_workspace;
typedef struct sy_layer sy_layer;

typedef struct sy_layer_options {
  uint32_t struct_size;
  sy_device_type backend;  // SY_CPU or SY_CUDA
  int32_t max_tokens;      // most tokens of this rank in a pass; the same on all ranks
  int32_t num_threads;     // SY_CPU: of this rank; 0: hardware threads / ranks
  int32_t device;          // SY_CUDA: -1: the current one
  int32_t reserved_sms;    // SY_CUDA: SMs left to other kernels
  sy_dtype compute;        // SY_F32, SY_BF16, SY_F8_E4M3, or SY_DTYPE_NONE: by the weights' type
  int32_t trace;           // record what every role does, for sy_layer_trace()
  int32_t no_cooperative_launch;
  sy_bad_ids bad_ids;
  int32_t large_ids_are_none;  // ids of num_experts or more mean none, as -1 does, and are not bad
  int32_t workspace_slot;      // of `workspace`: 0 to its slots - 1
  double deadline_seconds;     // 0: the world's
  // The memory to work in: a workspace of the same world and backend with room for this layer.
  // Null: memory of its own. The same on all ranks.
  const sy_workspace* workspace;
  const sy_layer* share_memory_with;  // null; layers share a workspace instead
  // The number of last passes whose rows of each expert are kept for sy_layer_recording(); 0: none.
  int32_t recorded_steps;
  // Ranks on several hosts: a host sums its outputs of one token of another host, rounds the sum,
  // and sends it as one row. The same on all ranks. See LayerOptions in layer.h.
  int32_t pre_sum_per_host;
  const char* name;        // of the layer, as its recording has it; null: none
  const char* table_file;  // null; a layer's rules choose the schedule of each pass
} sy_layer_options;
#define SY_LAYER_OPTIONS_INIT \
  { .struct_size = sizeof(sy_layer_options), .backend = SY_CPU, .max_tokens = 8192, .device = -1 }

// Collective. `options` may be null. Errors: as MoeLayer's constructor in layer.h.
SY_API sy_status sy_layer_create(sy_world* world, const sy_layer_spec* spec,
                                 const sy_layer_weights* weights, const sy_layer_options* options,
                                 sy_layer** out);
// Collective. A layer of a checkpoint in Hugging Face format, mapped; the layer keeps it open.
SY_API sy_status sy_layer_from_checkpoint(sy_world* world, const char* directory,
                                          int32_t layer_index, const sy_layer_options* options,
                                          sy_layer** out);
SY_API sy_status sy_layer_destroy(sy_layer** layer);

// One pass of this rank: T tokens, which may be 0.
typedef struct sy_forward {
  uint32_t struct_size;
  int32_t accumulate;  // 1: out += result, 0: out = result
  float out_scale;     // the result is multiplied by it
  // A promise that no rank has more tokens in this pass, the same on all ranks; 0: none. See
  // ForwardInput::max_tokens_per_rank in layer.h.
  int32_t max_tokens_per_rank;
  void* stream;            // SY_CUDA: a cudaStream_t; null: the default stream
  sy_tensor x;             // [T, H], bf16, f16, f32, or f8_e4m3 with x_scale; columns contiguous
  sy_tensor topk_ids;      // [T, K], i32 or i64; -1: none
  sy_tensor topk_weights;  // [T, K], f32 or bf16
  sy_tensor out;           // [T, H], bf16, f16 or f32, columns contiguous
  sy_tensor x_scale;       // [T, ceil(H / 128)], f32; absent unless x is f8_e4m3
  sy_tensor logits;        // [T, E], f32 or bf16, columns contiguous: routed as the spec says
  sy_tensor token_ids;     // [T], i32: hash-routed layers only
  sy_tensor ids_out;       // [T, K], i32, contiguous: the routing that was used; may be absent
  sy_tensor weights_out;   // [T, K], f32, contiguous; may be absent
} sy_forward;
#define SY_FORWARD_INIT \
  { .struct_size = sizeof(sy_forward), .out_scale = 1.0f }

// Every rank of the world must call it. With SY_CPU it returns when `out` is complete; with
// SY_CUDA it enqueues one kernel on `stream` (two where a shared expert stands beside experts of
// four bits) and returns. Errors: as MoeLayer::forward() in layer.h. After SY_TIMEOUT and
// SY_ABORTED the layer is dead.
SY_API sy_status sy_layer_forward(sy_layer* layer, const sy_forward* call);
// Fails as sy_layer_forward() would for passes that have ended, and waits for nothing.
SY_API sy_status sy_layer_check(sy_layer* layer);
// Lays out anew what the layer copied of its weights, which the caller has changed in place.
// SY_CUDA: on `stream`. Tensors that are used in place need no call. It does next to nothing where
// sy_layer_info.copies is 0.
SY_API sy_status sy_layer_refresh(sy_layer* layer, void* stream);
// Points the layer at other arrays of the same shapes and types. With a placement it is
// collective.
SY_API sy_status sy_layer_rebind(sy_layer* layer, const sy_layer_weights* weights);

typedef struct sy_layer_info {
  uint32_t struct_size;
  sy_device_type backend;
  sy_dtype compute;
  int32_t num_threads;
  uint64_t workspace_bytes;
  int32_t max_tokens;
  int32_t device;  // of SY_CUDA as asked for; -1: the one that was current
  int32_t hidden, intermediate, num_experts, top_k;
  int32_t has_router;
  int32_t shared_intermediate;
  sy_activation activation;
  // 1 if anything that the caller gave was copied or laid out anew, so that changes in place need
  // sy_layer_refresh(); else 0.
  int32_t copies;
} sy_layer_info;
#define SY_LAYER_INFO_INIT \
  { .struct_size = sizeof(sy_layer_info) }
SY_API sy_status sy_layer_get_info(const sy_layer* layer, sy_layer_info* out);

// Statistics of the last pass, zeros before the first: ForwardStats in layer.h. With SY_CUDA it
// waits for the device.
typedef struct sy_stats {
  uint32_t struct_size;
  // In: room in tokens_per_expert; 0: not wanted.
  int32_t num_experts;
  int64_t* tokens_per_expert;  // [E], over all ranks; written if num_experts is E
  uint64_t epoch;
  int64_t tokens;
  int64_t dropped_slots;
  int64_t nan_logits;
  int64_t nan_tokens;
  int64_t bad_slots;
  uint64_t dispatch_bytes;
  uint64_t combine_bytes;
  uint64_t signal_bytes;
  uint64_t heap_bytes_used;
  uint64_t heap_bytes_reserved;
  uint64_t workspace_bytes_used;
  double gate_seconds;
  double plan_seconds;
  double total_seconds;
} sy_stats;
#define SY_STATS_INIT \
  { .struct_size = sizeof(sy_stats) }
SY_API sy_status sy_layer_get_stats(sy_layer* layer, sy_stats* out);

// The events of this rank's last pass, as a Chrome trace (JSON, for ui.perfetto.dev). *size is the
// room in `text`; it becomes the bytes needed, with the final zero. Nothing is written if the room
// is too small; `text` may be null to ask for the size. SY_INVALID_ARGUMENT unless the layer
// records.
SY_API sy_status sy_layer_trace(sy_layer* layer, char* text, uint64_t* size);
// The routing of the last passes, as a file of recordings (JSON) with this one layer. `machine` is
// in words, and may be null. *size is as above, and grows from pass to pass. SY_INVALID_ARGUMENT
// unless the layer records. See MoeLayer::recording().
SY_API sy_status sy_layer_recording(sy_layer* layer, const char* machine, char* text,
                                    uint64_t* size);

// ----------------------------------------------------------------------------------- workspace

// Memory that the layers of a model work in one after the other, in place of one each: Workspace in
// workspace.h. Passes of layers in the same slot must follow one another, on all ranks in the same
// order. After a pass was given up, all layers in its slot are dead.
typedef struct sy_workspace_options {
  uint32_t struct_size;
  sy_device_type backend;  // that of the layers
  int32_t max_tokens;      // layers may declare less
  sy_dtype compute;        // that of the layers: SY_BF16, SY_F32 or SY_F8_E4M3
  int32_t slots;           // layers that work at the same time need a slot each; 1 to 16
  int32_t num_threads;     // SY_CPU: as in sy_layer_options; layers may have fewer
  int32_t device;          // SY_CUDA: as in sy_layer_options
  int32_t reserved_sms;    // SY_CUDA: as in sy_layer_options
  // SY_CUDA: functions for the memory that other ranks do not write, which is all of it in a world
  // of one rank. Both null: the library allocates it. allocate() returns device memory, or null;
  // release() gets what it returned, and both get `user`. They are called with the device current,
  // by the thread that creates, releases, restores or destroys the workspace, or destroys the last
  // layer in it. They must stay callable until then. They may not throw.
  void* (*allocate)(uint64_t bytes, void* user);
  void (*release)(void* memory, void* user);
  void* user;
  int32_t pre_sum_per_host;  // with room for layers with that option
  // The type of experts' weights of four bits, SY_F4_E2M1 or SY_U4, which want more memory with
  // SY_CUDA and SY_F8_E4M3; or SY_DTYPE_NONE. See WorkspaceOptions in workspace.h.
  sy_dtype weights;
} sy_workspace_options;
#define SY_WORKSPACE_OPTIONS_INIT                                                       \
  {                                                                                     \
    .struct_size = sizeof(sy_workspace_options), .backend = SY_CPU, .max_tokens = 8192, \
    .compute = SY_BF16, .slots = 1, .device = -1                                        \
  }

// Collective. Makes room for a layer of each of specs[0 .. num_specs), and for every layer that
// needs no more than one of them. Only a spec's sizes, top_k, shared expert, weight_on_input and
// activation matter; for layers with a placement, num_experts is the number of places. All have the
// same struct_size. `options` may be null. Errors: as Workspace's constructor in workspace.h.
SY_API sy_status sy_workspace_create(sy_world* world, const sy_layer_spec* specs, int32_t num_specs,
                                     const sy_workspace_options* options, sy_workspace** out);

typedef struct sy_workspace_info {
  uint32_t struct_size;
  sy_device_type backend;
  int32_t slots;
  int32_t released;  // 1 between sy_workspace_release() and sy_workspace_restore()
  // Bytes of this rank in all slots, released or not. SY_CPU: address space; passes commit what
  // they use.
  uint64_t bytes;
} sy_workspace_info;
#define SY_WORKSPACE_INFO_INIT \
  { .struct_size = sizeof(sy_workspace_info) }
SY_API sy_status sy_workspace_get_info(const sy_workspace* workspace, sy_workspace_info* out);

// Collective. Gives the memory back until sy_workspace_restore(), and loses its contents. No pass
// may be under way or enqueued. Until then sy_layer_forward() of its layers is SY_INVALID_ARGUMENT.
// Graphs that were captured before can be launched again after sy_workspace_restore(), but not
// where memory came from allocate(): capture those anew.
SY_API sy_status sy_workspace_release(sy_workspace* workspace);
// Collective. SY_CAPACITY_EXCEEDED if memory is short; it is released then.
SY_API sy_status sy_workspace_restore(sy_workspace* workspace);
// The memory stays for the layers that are in it.
SY_API sy_status sy_workspace_destroy(sy_workspace** workspace);

// --------------------------------------------------------------------------------------- top-k

// Chooses K experts for each of T tokens, on the host: route() in routing.h.
//   logits           [T, E] f32, contiguous
//   correction_bias  [E] f32, contiguous, or null
//   ids, weights     [T, K] i32 and f32, contiguous, out
//   nan_logits       out; may be null
SY_API sy_status sy_topk(const sy_routing* routing, int32_t top_k, const sy_tensor* logits,
                         const sy_tensor* correction_bias, const sy_tensor* ids,
                         const sy_tensor* weights, int64_t* nan_logits);

// sy_topk() where the tensors are: on the host, or, enqueued, on a GPU (topk() in operators.h).
// All of them are on the device of the logits.
typedef struct sy_topk_call {
  uint32_t struct_size;
  int32_t top_k;
  void* stream;  // SY_CUDA: a cudaStream_t
  const sy_routing* routing;
  sy_tensor logits;           // [T, E] f32, contiguous; SY_CUDA: also bf16 or f16, any row stride
  sy_tensor correction_bias;  // [E] f32, contiguous; absent unless the routing has one
  sy_tensor ids;              // [T, K] i32, contiguous, out
  sy_tensor weights;          // [T, K] f32, contiguous, out
} sy_topk_call;
#define SY_TOPK_CALL_INIT \
  { .struct_size = sizeof(sy_topk_call) }
SY_API sy_status sy_topk_run(const sy_topk_call* call);

// ----------------------------------------------------------------------------------- operators

// grouped_gemm.h says more: the products of many experts with their rows, and the order of rows.

typedef int32_t sy_rows_kind;
enum {
  SY_ROWS_PACKED = 0,   // an expert's rows follow those of the expert before
  SY_ROWS_BLOCKED = 1,  // each expert's rows begin at the next multiple of `size` rows
  SY_ROWS_PADDED = 2    // expert e's rows begin at row e * size, and are at most `size`
};
typedef struct sy_row_layout {
  sy_rows_kind kind;
  uint32_t reserved;  // 0
  int64_t size;       // 0 for SY_ROWS_PACKED
} sy_row_layout;
// The most rows that the layout has for experts with any numbers of rows that sum up to `rows`.
// `layout` may be null: packed.
SY_API sy_status sy_rows_needed(const sy_row_layout* layout, int32_t num_experts, int64_t rows,
                                int64_t* out);

typedef int32_t sy_gate_order;
enum {
  SY_GATE_UP = 0,     // a gated weight's rows: gate 0 .. I - 1, then up 0 .. I - 1
  SY_UP_GATE = 1,     // up first
  SY_INTERLEAVED = 2  // gate 0, up 0, gate 1, up 1, ...
};

typedef struct sy_grouped_gemm sy_grouped_gemm;

// out[r] = row weight * epilogue(weight[e] x[r] + bias[e]) for every row r that expert e has.
typedef struct sy_grouped_gemm_spec {
  uint32_t struct_size;
  int32_t has_epilogue;    // 0: the output is the product itself
  sy_activation epilogue;  // gated: the output has N / 2 columns
  sy_gate_order order;     // of gated weights and biases
  uint32_t reserved;       // 0
  sy_matrices weights;     // [E, N, K] in any strides, with bias [E, N]; they must outlive the
                           // operator
  sy_tensor zero;          // of u4 weights, as in sy_layer_weights
} sy_grouped_gemm_spec;
#define SY_GROUPED_GEMM_SPEC_INIT                                                 \
  {                                                                               \
    .struct_size = sizeof(sy_grouped_gemm_spec), .has_epilogue = 0, .epilogue = { \
      .gated = 1,                                                                 \
      .alpha = 1.0f,                                                              \
      .limit = INFINITY                                                           \
    }                                                                             \
  }

typedef int32_t sy_choice;
enum {
  SY_BY_RULE = 0,  // left to the library
  SY_YES = 1,
  SY_NO = 2
};

typedef struct sy_grouped_gemm_options {
  uint32_t struct_size;
  sy_device_type backend;  // SY_CPU or SY_CUDA
  int32_t max_rows;        // most rows of a call, over all experts
  int32_t num_threads;     // SY_CPU: 0: the hardware's
  int32_t device;          // SY_CUDA: -1: the current one
  int32_t reserved_sms;    // SY_CUDA: SMs left to other kernels
  // SY_CPU: SY_F32, SY_BF16 or SY_F8_E4M3. SY_CUDA: SY_BF16, SY_F16 or SY_F8_E4M3. SY_DTYPE_NONE:
  // by the weights' type, which for f16 is SY_F32 on a CPU, and SY_F16 on a GPU.
  sy_dtype compute;
  uint32_t reserved;  // 0
  // SY_CUDA: choices in place of rules. GroupedSchedule in schedule.h has their values. 0: the
  // rule. Structs without these fields leave all to the rules.
  int32_t tile_rows;
  int32_t stages;
  sy_choice paired;
  int32_t band;
  int32_t splits;
  uint32_t reserved2;  // 0
  // SY_CUDA: a table that `switchyard tune --kernel grouped` wrote for this shape, type and GPU.
  // The kernel chooses from it by `ends`. Only `paired` may be chosen beside it. Null: the rules.
  // Errors: as GroupedGemmOptions::table, and those of reading a file.
  const char* table_file;
} sy_grouped_gemm_options;
#define SY_GROUPED_GEMM_OPTIONS_INIT                                                      \
  {                                                                                       \
    .struct_size = sizeof(sy_grouped_gemm_options), .backend = SY_CPU, .max_rows = 65536, \
    .device = -1                                                                          \
  }

// `options` may be null. Errors: as GroupedGemm's constructor in grouped_gemm.h.
SY_API sy_status sy_grouped_gemm_create(const sy_grouped_gemm_spec* spec,
                                        const sy_grouped_gemm_options* options,
                                        sy_grouped_gemm** out);
SY_API sy_status sy_grouped_gemm_destroy(sy_grouped_gemm** gemm);

typedef struct sy_grouped_gemm_info {
  uint32_t struct_size;
  sy_device_type backend;
  sy_dtype compute;
  int32_t num_threads;
  int32_t num_experts, n, k;
  int32_t output_columns;  // n, or n / 2
  int32_t max_rows;
  int32_t copies;  // as in sy_layer_info, of sy_grouped_gemm_refresh()
} sy_grouped_gemm_info;
#define SY_GROUPED_GEMM_INFO_INIT \
  { .struct_size = sizeof(sy_grouped_gemm_info) }
SY_API sy_status sy_grouped_gemm_get_info(const sy_grouped_gemm* gemm, sy_grouped_gemm_info* out);

// Index tensors and weights of rows are contiguous. Absent ones (ndim 0) mean what grouped_gemm.h
// says.
typedef struct sy_grouped_gemm_call {
  uint32_t struct_size;
  uint32_t reserved;         // 0
  void* stream;              // SY_CUDA: a cudaStream_t
  sy_row_layout x_layout;    // of x, or of index
  sy_row_layout out_layout;  // of out and products; packed where there is an out_index
  sy_tensor x;            // [rows, K], bf16, f16, f32, or f8_e4m3 with x_scale; columns contiguous
  sy_tensor ends;         // [E], i32 or i64: rows of experts 0 to e together
  sy_tensor out;          // [rows, N or N / 2], bf16, f16 or f32, columns contiguous
  sy_tensor x_scale;      // [rows, ceil(K / 128)], f32
  sy_tensor index;        // [rows of x_layout], i32: each row's row of x
  sy_tensor out_index;    // [rows in packed order], i32: each row's place in out; -1: not stored
  sy_tensor row_weights;  // [rows in packed order], f32
  sy_tensor products;     // [rows, N], of out's type: what the epilogue is applied to
  sy_tensor chosen;       // SY_CUDA: [1], i32, out: the table's entry that was chosen; -1: none
} sy_grouped_gemm_call;
#define SY_GROUPED_GEMM_CALL_INIT \
  { .struct_size = sizeof(sy_grouped_gemm_call) }

// Errors: as GroupedGemm::run() in grouped_gemm.h. A call that is refused has written nothing.
SY_API sy_status sy_grouped_gemm_run(sy_grouped_gemm* gemm, const sy_grouped_gemm_call* call);
// Lays out anew what the operator copied of its weights, scales and biases, which the caller has
// changed in place. SY_CUDA: on `stream`. It does next to nothing where sy_grouped_gemm_info.copies
// is 0.
SY_API sy_status sy_grouped_gemm_refresh(sy_grouped_gemm* gemm, void* stream);

// The order of slots (token, k) by expert, on the host; sy_permute_run() also on a GPU. All tensors
// are contiguous.
//   ids        [T, K] i32 or i64; negative ones, and those of num_experts or more, are none
//   layout     null: packed
//   ends       [E] i32, out
//   positions  [T, K] i32, out: the slot's row; -1: it has none
//   tokens     [at least *rows] i32, out: whose row it is; -1: nobody's, and behind *rows. May be
//              null
//   rows       out: the rows of the layout; may be null
SY_API sy_status sy_permute(const sy_tensor* ids, int32_t num_experts, const sy_row_layout* layout,
                            const sy_tensor* ends, const sy_tensor* positions,
                            const sy_tensor* tokens, int64_t* rows);

// out[t] = scale * sum over k of weights[t, k] * rows[positions[t, k]], on the host; with
// `accumulate` out[t] += that.
//   rows       [any, H] bf16, f16 or f32, columns contiguous
//   positions  [T, K] i32, contiguous; -1: none
//   weights    [T, K] f32 or bf16, contiguous; null: 1
//   out        [T, H] bf16, f16 or f32, columns contiguous
SY_API sy_status sy_unpermute(const sy_tensor* rows, const sy_tensor* positions,
                              const sy_tensor* weights, float scale, int32_t accumulate,
                              const sy_tensor* out);

// sy_permute() where the tensors are: on the host, or, enqueued, on a GPU, without waiting for it.
// All of them are on the device of the ids, and contiguous.
typedef struct sy_permute_call {
  uint32_t struct_size;
  int32_t num_experts;
  void* stream;  // SY_CUDA: a cudaStream_t
  sy_row_layout layout;
  sy_tensor ids;        // [T, K] i32 or i64
  sy_tensor ends;       // [E] i32, out
  sy_tensor positions;  // [T, K] i32, out
  sy_tensor tokens;  // [sy_rows_needed() or more] i32, out, -1 behind the layout's rows; or absent
  // [1] i32, out, or absent: the slots for which a padded expert has no room. On a GPU they get
  // position -1, and ends do not count them; on the host the call is refused.
  sy_tensor dropped;
  sy_tensor workspace;  // SY_CUDA: [sy_permute_workspace() or more] u8, at a multiple of 4
} sy_permute_call;
#define SY_PERMUTE_CALL_INIT \
  { .struct_size = sizeof(sy_permute_call) }
SY_API sy_status sy_permute_run(const sy_permute_call* call);
// The bytes of workspace for that many slots, T * K.
SY_API sy_status sy_permute_workspace(int64_t slots, int32_t num_experts, uint64_t* bytes);

// sy_unpermute() where the tensors are: on the host, or, enqueued, on a GPU, where positions that
// are no row are left out. All of them are on the device of the rows.
typedef struct sy_unpermute_call {
  uint32_t struct_size;
  int32_t accumulate;
  void* stream;  // SY_CUDA: a cudaStream_t
  float scale;
  uint32_t reserved;    // 0
  sy_tensor rows;       // [any, H] bf16, f16 or f32, columns contiguous
  sy_tensor positions;  // [T, K] i32, contiguous
  sy_tensor weights;    // [T, K] f32 or bf16, contiguous; absent: 1
  sy_tensor out;        // [T, H] bf16, f16 or f32, columns contiguous
} sy_unpermute_call;
#define SY_UNPERMUTE_CALL_INIT \
  { .struct_size = sizeof(sy_unpermute_call), .scale = 1.0f }
SY_API sy_status sy_unpermute_run(const sy_unpermute_call* call);

// ------------------------------------------------------------------------------------ exchange

// Dispatch and combine alone: tokens to the ranks of their experts, and results back. exchange.h
// says more about every field and call.

typedef struct sy_exchange sy_exchange;
typedef struct sy_exchange_handle sy_exchange_handle;

typedef int32_t sy_combine_weights;
enum {
  SY_WEIGHTS_BY_RECEIVER = 0,  // the token's rank multiplies, as it sums
  SY_WEIGHTS_BY_SENDER = 1,    // the expert's rank does, before it sends
  SY_WEIGHTS_NONE = 2          // an unweighted sum
};

// The same on all ranks.
typedef struct sy_exchange_spec {
  uint32_t struct_size;
  int32_t hidden;       // H
  int32_t num_experts;  // E, over all ranks
  int32_t top_k;        // K
  int32_t max_tokens;   // most tokens of a rank in a dispatch
  sy_dtype dispatch;    // of received rows: SY_BF16, SY_F16, SY_F32 or SY_F8_E4M3
  sy_dtype combine;     // of results: SY_BF16, SY_F16 or SY_F32
  sy_combine_weights weights;
  int32_t pre_sum;  // rows of one token on the same rank are summed there; not by receiver
  // A host sums the rows of one token of another host before they cross; not by receiver.
  int32_t pre_sum_per_host;
  sy_row_layout layout;  // padded with size 0: with room for all tokens of all ranks
  sy_tensor placement;   // as in sy_layer_weights
  // Ids of num_experts or more mean none, as -1 does; else they are errors.
  int32_t large_ids_are_none;
} sy_exchange_spec;
#define SY_EXCHANGE_SPEC_INIT \
  { .struct_size = sizeof(sy_exchange_spec), .dispatch = SY_BF16, .combine = SY_BF16 }

typedef struct sy_exchange_options {
  uint32_t struct_size;
  sy_device_type backend;   // SY_CPU or SY_CUDA
  int32_t num_threads;      // SY_CPU: of this rank; 0: hardware threads / ranks
  int32_t device;           // SY_CUDA: -1: the current one
  int32_t max_sms;          // SY_CUDA: the most SMs that a call uses; 0: a rule's
  int32_t trace;            // record what is done, for sy_exchange_trace()
  double deadline_seconds;  // 0: the world's
} sy_exchange_options;
#define SY_EXCHANGE_OPTIONS_INIT \
  { .struct_size = sizeof(sy_exchange_options), .backend = SY_CPU, .device = -1 }

// Collective. `options` may be null. Errors: as Exchange's constructor in exchange.h.
SY_API sy_status sy_exchange_create(sy_world* world, const sy_exchange_spec* spec,
                                    const sy_exchange_options* options, sy_exchange** out);
SY_API sy_status sy_exchange_destroy(sy_exchange** exchange);

typedef struct sy_exchange_info {
  uint32_t struct_size;
  sy_device_type backend;
  int32_t num_threads;         // SY_CUDA: 0
  int32_t reserved;            // 0
  int32_t own_begin, own_end;  // the experts, or places, of this rank
  int64_t rows_needed;         // for all rows that may arrive
  sy_row_layout layout;        // with the room of padded experts
} sy_exchange_info;
#define SY_EXCHANGE_INFO_INIT \
  { .struct_size = sizeof(sy_exchange_info) }
SY_API sy_status sy_exchange_get_info(const sy_exchange* exchange, sy_exchange_info* out);

// The record of a dispatch, for its combine and for dispatches that reuse it. Exchange and handle
// may be destroyed in any order, but not while a call with both is on its way.
SY_API sy_status sy_exchange_handle_create(sy_exchange* exchange, sy_exchange_handle** out);
SY_API sy_status sy_exchange_handle_destroy(sy_exchange_handle** handle);

typedef struct sy_dispatch_input {
  uint32_t struct_size;
  int32_t reuse;      // the handle's ids and weights again; then both are absent
  void* stream;       // SY_CUDA: a cudaStream_t
  sy_tensor x;        // [T, H], columns contiguous
  sy_tensor x_scale;  // [T, ceil(H / 128)] f32: of SY_F8_E4M3
  sy_tensor ids;      // [T, K] i32 or i64, contiguous; -1: none; E or more: see large_ids_are_none
  sy_tensor weights;  // [T, K] f32 or bf16, contiguous; absent: 1
} sy_dispatch_input;
#define SY_DISPATCH_INPUT_INIT \
  { .struct_size = sizeof(sy_dispatch_input) }

// The tensors for received rows. Each but `rows` may be absent. Memory without a row stays as it
// was.
typedef struct sy_dispatch_output {
  uint32_t struct_size;
  uint32_t reserved;   // 0
  void* stream;        // SY_CUDA: a cudaStream_t
  sy_tensor rows;      // [capacity, H], columns contiguous
  sy_tensor scales;    // [capacity, ceil(H / 128)] f32: of SY_F8_E4M3, and then needed
  sy_tensor ends;      // [own experts] i32: rows of this rank's experts 0 to e together
  sy_tensor counts;    // [own experts] i32: rows of each
  sy_tensor num_rows;  // [1] i32
  sy_tensor origins;   // [capacity, 3] i32, contiguous: rank, token and k of each row
  sy_tensor weights;   // [capacity] f32, in packed order
} sy_dispatch_output;
#define SY_DISPATCH_OUTPUT_INIT \
  { .struct_size = sizeof(sy_dispatch_output) }

typedef struct sy_combine_input {
  uint32_t struct_size;
  uint32_t reserved;  // 0
  void* stream;       // SY_CUDA: a cudaStream_t
  sy_tensor rows;     // [rows, H], columns contiguous, in the order of the received ones
} sy_combine_input;
#define SY_COMBINE_INPUT_INIT \
  { .struct_size = sizeof(sy_combine_input) }

// out[t] = scale * the sum over k, in fp32; with `accumulate` out[t] += that.
typedef struct sy_combine_output {
  uint32_t struct_size;
  int32_t accumulate;
  float scale;
  uint32_t reserved;  // 0
  void* stream;       // SY_CUDA: a cudaStream_t
  sy_tensor out;      // [T, H], bf16, f16 or f32, columns contiguous
} sy_combine_output;
#define SY_COMBINE_OUTPUT_INIT \
  { .struct_size = sizeof(sy_combine_output), .scale = 1.0f }

// Errors: as the calls of Exchange in exchange.h.
SY_API sy_status sy_exchange_dispatch_send(sy_exchange* exchange, const sy_dispatch_input* input,
                                           sy_exchange_handle* handle);
SY_API sy_status sy_exchange_dispatch_recv(sy_exchange* exchange, const sy_dispatch_output* output,
                                           sy_exchange_handle* handle);
// Sends and receives in one call. With SY_CUDA rows that arrive can be stored while more are sent.
SY_API sy_status sy_exchange_dispatch(sy_exchange* exchange, const sy_dispatch_input* input,
                                      const sy_dispatch_output* output, sy_exchange_handle* handle);
SY_API sy_status sy_exchange_combine_send(sy_exchange* exchange, const sy_combine_input* input,
                                          sy_exchange_handle* handle);
SY_API sy_status sy_exchange_combine_recv(sy_exchange* exchange, const sy_combine_output* output,
                                          sy_exchange_handle* handle);
// Sends and receives in one call. Input and output are checked before anything is sent, as in
// sy_exchange_dispatch().
SY_API sy_status sy_exchange_combine(sy_exchange* exchange, const sy_combine_input* input,
                                     const sy_combine_output* output, sy_exchange_handle* handle);
// Rows that sy_exchange_dispatch_recv() needs for the dispatch that was sent with the handle. Waits
// for the counts of all ranks.
SY_API sy_status sy_exchange_rows_needed(sy_exchange* exchange, sy_exchange_handle* handle,
                                         void* stream, int64_t* out);
// Fails as the next call would if an earlier one has failed. Call this when you replay graphs.
SY_API sy_status sy_exchange_check(sy_exchange* exchange);

// ExchangeStats in exchange.h.
typedef struct sy_exchange_stats {
  uint32_t struct_size;
  uint32_t reserved;  // 0
  uint64_t dispatches;
  uint64_t combines;
  int64_t tokens;
  int64_t tokens_sent;
  int64_t rows_received;
  int64_t rows_returned;
  uint64_t dispatch_bytes;
  uint64_t combine_bytes;
  uint64_t signal_bytes;
  uint64_t heap_bytes_reserved;
} sy_exchange_stats;
#define SY_EXCHANGE_STATS_INIT \
  { .struct_size = sizeof(sy_exchange_stats) }
SY_API sy_status sy_exchange_get_stats(sy_exchange* exchange, sy_exchange_stats* out);
// As sy_layer_trace().
SY_API sy_status sy_exchange_trace(sy_exchange* exchange, char* text, uint64_t* size);

// ---------------------------------------------------------------------------------------- heap

// The symmetric heap for kernels and programs of your own: memory of the same size on every rank,
// which all ranks read and write. symmetric_heap.h says more about every function; peer.h and
// device/peer.cuh have what hosts and kernels do with it.

typedef struct sy_heap sy_heap;

typedef struct sy_heap_options {
  uint32_t struct_size;
  sy_device_type backend;   // whose memory: SY_CPU or SY_CUDA
  int32_t device;           // SY_CUDA only: of this rank; -1: the current one
  uint32_t reserved;        // 0
  uint64_t bytes;           // of each rank, 1 or more; the same on all ranks
  double deadline_seconds;  // of waits that are given no other; 0: the world's
} sy_heap_options;
#define SY_HEAP_OPTIONS_INIT \
  { .struct_size = sizeof(sy_heap_options), .backend = SY_CPU, .device = -1 }

// Collective. All bytes are 0. Errors: as SymmetricHeap's constructor.
SY_API sy_status sy_heap_create(sy_world* world, const sy_heap_options* options, sy_heap** out);
SY_API sy_status sy_heap_destroy(sy_heap** heap);

// All ranks call these with the same arguments in the same order; sy_heap_barrier() finds it if
// they do not. `alignment`: a power of two up to 4096; 0: 128.
SY_API sy_status sy_heap_allocate(sy_heap* heap, uint64_t bytes, uint64_t alignment, void** out);
SY_API sy_status sy_heap_free(sy_heap* heap, void* pointer);
SY_API sy_status sy_heap_reset(sy_heap* heap);

// The place in the memory of `rank` that corresponds to `pointer` in this rank's memory.
SY_API sy_status sy_heap_translate(const sy_heap* heap, const void* pointer, int32_t rank,
                                   void** out);

// PeerMap in peer_map.h, which kernels take by value. It has no struct_size, and never grows.
#define SY_MAX_PEERS 64
typedef struct sy_peer_map {
  int32_t rank;
  int32_t size;
  uint64_t bytes;
  uint64_t deadline_ns;
  void* bases[SY_MAX_PEERS];  // of each rank's memory; null from `size` on
} sy_peer_map;
SY_API sy_status sy_heap_get_peer_map(const sy_heap* heap, sy_peer_map* out);

// SY_CPU only. sy_heap_signal() raises a flag of another rank, at its translated address, after all
// that this thread wrote before. sy_heap_wait() waits until a flag of this rank, which `peer`
// raises, has at least a value. A wait that passes its deadline is SY_TIMEOUT, and ends the heap on
// all ranks. On a GPU kernels do this.
SY_API sy_status sy_heap_signal(sy_heap* heap, uint64_t* flag, uint64_t value);
SY_API sy_status sy_heap_wait(sy_heap* heap, const uint64_t* flag, uint64_t value, int32_t peer);

// Collective: waits for all ranks, not for streams, and checks that they allocated alike.
SY_API sy_status sy_heap_barrier(sy_heap* heap);
// Fails if a wait was given up, on any rank, or the world was aborted.
SY_API sy_status sy_heap_check(const sy_heap* heap);

// SymmetricHeapStats.
typedef struct sy_heap_info {
  uint32_t struct_size;
  sy_device_type backend;
  int32_t device;     // -1 for SY_CPU
  uint32_t reserved;  // 0
  uint64_t bytes;
  uint64_t bytes_reserved;
  uint64_t bytes_allocated;
  uint64_t most_allocated;
  uint64_t largest_free;
  uint64_t allocations;
  uint64_t calls;
} sy_heap_info;
#define SY_HEAP_INFO_INIT \
  { .struct_size = sizeof(sy_heap_info) }
SY_API sy_status sy_heap_get_info(const sy_heap* heap, sy_heap_info* out);

// --------------------------------------------------------------------------------------- tuner

// Chooses a kernel's configuration by the routing: tuner.h, which says more about every field. It
// serves kernels of any origin, which a callback times.

typedef int32_t sy_generator;
enum {
  SY_DISTINCT = 0,  // each token draws top_k distinct experts, as a router does
  SY_REPEATED = 1   // tokens * top_k draws, each independent, as RaMP's
};
// Draws counts[0 .. num_experts), which sum up to tokens * top_k, with a balancedness near `beta`.
SY_API sy_status sy_draw_counts(sy_generator generator, int32_t tokens, int32_t num_experts,
                                int32_t top_k, double beta, uint64_t seed, int64_t* counts);

typedef int32_t sy_form;
enum {  // the forms of the cost model: tuner::Form
  SY_FORM_TASKS = 0,
  SY_FORM_WAVES = 1,
  SY_FORM_ROUNDED_WAVES = 2,
  SY_FORM_FULL = 3,
  SY_FORM_ROUNDED_FULL = 4,
  SY_FORM_EXPERTS = 5
};

typedef struct sy_tune_model {
  const char* name;
  int32_t num_experts, top_k;
  int32_t n, k;  // of an expert's first matrix: rows (gate and up together), columns
  int32_t unseen;
  uint32_t reserved;  // 0
} sy_tune_model;

typedef struct sy_tune_configuration {
  const char* name;                                          // no two of a kernel are equal
  int32_t token_rows, weight_rows, splits, blocks, group_m;  // of a task; each 1 or more
  int32_t is_rule;                 // stands for the kernel's own rule, and is never chosen
  int32_t num_values;              // what the kernel makes of it; may be 0
  uint32_t reserved;               // 0
  const char* const* value_names;  // [num_values]
  const int64_t* values;           // [num_values]
} sy_tune_configuration;

typedef struct sy_tune_kernel {
  uint32_t struct_size;
  int32_t num_configurations;
  const char* name;
  int64_t version;      // to be increased with every change that changes times
  const char* machine;  // where it runs, in words, with all that times depend on
  uint64_t l2_bytes;    // 0: unknown
  int32_t num_sms;      // blocks that run at the same time
  uint32_t reserved;    // 0
  const sy_tune_configuration* configurations;  // [num_configurations]
} sy_tune_kernel;
#define SY_TUNE_KERNEL_INIT \
  { .struct_size = sizeof(sy_tune_kernel) }

// Two grids of points: to fit on, and to judge by. A null list stands for the default one; a list
// that is not null may have 0 elements.
typedef struct sy_tune_plan {
  uint32_t struct_size;
  sy_generator generator;
  uint64_t seed;
  int32_t num_models, num_tokens, num_betas, num_test_tokens, num_test_betas;
  uint32_t reserved;  // 0
  const sy_tune_model* models;
  const int32_t* tokens;
  const double* betas;
  const int32_t* test_tokens;
  const double* test_betas;
  // A file of recordings, whose histograms are fitted on and judged by, too: at most
  // `most_recorded` of each model (0: 24). Every model must be that of a recorded layer, by its
  // experts and top_k. Null: none.
  const char* recordings_file;
  int32_t most_recorded;
  uint32_t reserved2;  // 0
} sy_tune_plan;
#define SY_TUNE_PLAN_INIT \
  { .struct_size = sizeof(sy_tune_plan) }

// Times configuration `configuration` of the kernel on plan.models[model] and counts[0 ..
// num_experts). Returns SY_OK and the median of several repetitions, in microseconds;
// SY_UNSUPPORTED if the configuration cannot run this model; anything else to stop.
// *variation, their standard deviation over their mean, is 0 unless it is set. May not throw.
typedef sy_status (*sy_tune_time)(void* user, int32_t model, int32_t configuration,
                                  const int64_t* counts, int32_t num_experts, double* median_us,
                                  double* variation);
// Called before each timing, and at the end, when model is -1. May not throw.
typedef void (*sy_tune_progress)(void* user, uint64_t done, uint64_t total, double seconds,
                                 double seconds_left, int32_t model);

typedef struct sy_tune_options {
  uint32_t struct_size;
  int32_t resume;         // go on with the file, if it exists; otherwise it must not exist
  const char* file;       // where the profile is kept, whole after each point
  double budget_seconds;  // no timing begins after so many
  sy_tune_time time;
  sy_tune_progress progress;  // may be null
  void* user;                 // of both
  // Leave out what is slower than the best by more than this share at all pilots; 0: nothing. See
  // MeasureOptions::prune in tuner.h.
  double prune;
} sy_tune_options;
#define SY_TUNE_OPTIONS_INIT \
  { .struct_size = sizeof(sy_tune_options), .budget_seconds = INFINITY }

// Times what the profile lacks. *complete (may be null) is 1 if it lacks nothing now. A file of
// another kernel, version or machine is SY_INVALID_ARGUMENT, and the message names both. A callback
// that stops is SY_ABORTED.
SY_API sy_status sy_tune_measure(const sy_tune_kernel* kernel, const sy_tune_plan* plan,
                                 const sy_tune_options* options, int32_t* complete);
// Fits the models of a profile that are timed completely, and writes the fit. `relative`: least
// squares of errors over times; 0: of errors.
SY_API sy_status sy_tune_fit(const char* profile_file, sy_form form, int32_t relative,
                             const char* fit_file);
// Judges a fit of this form by the profile's times: a JSON list with an object for each point to
// judge by. *size is as in sy_layer_trace().
SY_API sy_status sy_tune_evaluate(const char* profile_file, sy_form form, int32_t relative,
                                  char* text, uint64_t* size);

// A fit, to choose by.
typedef struct sy_tuner sy_tuner;
// A fit of another machine or kernel, or older than the kernel, is SY_INVALID_ARGUMENT; the message
// names both.
SY_API sy_status sy_tuner_open(const sy_tune_kernel* kernel, const char* fit_file, sy_tuner** out);
// The configuration with the least predicted time. `predicted_us` may be null.
SY_API sy_status sy_tuner_select(const sy_tuner* tuner, const char* model, const int64_t* counts,
                                 int32_t num_experts, int32_t* configuration, double* predicted_us);
SY_API sy_status sy_tuner_destroy(sy_tuner** tuner);

#ifdef __cplusplus
}
#endif

#endif  // SWITCHYARD_C_H_
