#include "failures/trial.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/mix64.h"
#include "support/numbers.h"

namespace switchyard::failures {
namespace {

// Tells the choice of Harm::kReturn from the others that follow from a seed.
constexpr std::uint64_t kReturns = 0x72657475726e;

const char* to_string(Harm harm) {
  switch (harm) {
    case Harm::kKill: return "kill";
    case Harm::kStop: return "stop";
    case Harm::kExit: return "exit";
    case Harm::kInterrupt: return "interrupt";
    case Harm::kReturn: return "return";
  }
  return "";
}

const char* to_string(Scene scene) {
  switch (scene) {
    case Scene::kPass: return "pass";
    case Scene::kCollective: return "collective";
    case Scene::kExchange: return "exchange";
    case Scene::kHeap: return "heap";
    case Scene::kClose: return "close";
    case Scene::kStart: return "start";
    case Scene::kMixed: return "mix";
  }
  return "";
}

// One of several, each as often as its weight says.
template <typename T>
T draw(test::Numbers& numbers, std::initializer_list<std::pair<T, int>> choices) {
  int total = 0;
  for (const auto& [choice, weight] : choices) total += weight;
  int roll = numbers.between(0, total - 1);
  for (const auto& [choice, weight] : choices) {
    if (roll < weight) return choice;
    roll -= weight;
  }
  return choices.begin()->first;
}

// Symmetric heaps are for ranks of one host.
Act draw_act(test::Numbers& numbers, bool one_host) {
  const int heap = one_host ? 1 : 0;
  return draw<Act>(numbers, {{Act::kPass, 5},
                             {Act::kBarrier, 3},
                             {Act::kMakeLayer, 1},
                             {Act::kMakeExchange, 1},
                             {Act::kMakeHeap, heap},
                             {Act::kDispatch, 3},
                             {Act::kHeapRing, 2 * heap},
                             {Act::kHeapAll, heap},
                             {Act::kHeapBarrier, 2 * heap}});
}

std::vector<Act> draw_acts(test::Numbers& numbers, Scene scene, bool one_host) {
  std::vector<Act> acts;
  const int heap = one_host ? 1 : 0;
  switch (scene) {
    case Scene::kPass: return {Act::kPass};
    case Scene::kExchange: return {Act::kDispatch, Act::kCombine};
    case Scene::kStart: return {Act::kBarrier};
    case Scene::kCollective:
      for (int i = numbers.between(1, 3); i > 0; --i) {
        acts.push_back(draw<Act>(numbers, {{Act::kBarrier, 3},
                                           {Act::kMakeLayer, 2},
                                           {Act::kMakeExchange, 2},
                                           {Act::kMakeHeap, 2 * heap}}));
      }
      return acts;
    case Scene::kHeap:
      for (int i = numbers.between(1, 3); i > 0; --i) {
        acts.push_back(
            draw<Act>(numbers, {{Act::kHeapRing, 2}, {Act::kHeapAll, 1}, {Act::kHeapBarrier, 2}}));
      }
      return acts;
    case Scene::kClose:
      for (int i = numbers.between(1, 2); i > 0; --i) acts.push_back(draw_act(numbers, one_host));
      break;
    case Scene::kMixed:
      acts.push_back(Act::kPass);
      for (int i = numbers.between(1, 4); i > 0; --i) acts.push_back(draw_act(numbers, one_host));
      if (std::ranges::count(acts, Act::kPass) == static_cast<std::ptrdiff_t>(acts.size())) {
        acts.push_back(Act::kBarrier);
      }
      break;
  }
  // A dispatch has its combine, at once or later in the round.
  for (std::size_t i = 0; i < acts.size(); ++i) {
    if (acts[i] != Act::kDispatch) continue;
    const auto next = static_cast<std::size_t>(
        std::find(acts.begin() + static_cast<std::ptrdiff_t>(i) + 1, acts.end(), Act::kDispatch) -
        acts.begin());
    const int at = numbers.between(static_cast<int>(i) + 1, static_cast<int>(next));
    acts.insert(acts.begin() + at, Act::kCombine);
  }
  return acts;
}

}  // namespace

const char* to_string(Act act) {
  switch (act) {
    case Act::kBarrier: return "barrier";
    case Act::kMakeLayer: return "make layer";
    case Act::kMakeExchange: return "make exchange";
    case Act::kMakeHeap: return "make heap";
    case Act::kPass: return "pass";
    case Act::kDispatch: return "dispatch";
    case Act::kCombine: return "combine";
    case Act::kHeapRing: return "heap ring";
    case Act::kHeapAll: return "heap all";
    case Act::kHeapBarrier: return "heap barrier";
    case Act::kCloseLayer: return "close layer";
    case Act::kCloseExchange: return "close exchange";
    case Act::kCloseHeap: return "close heap";
    case Act::kCloseWorld: return "close world";
  }
  return "";
}

Trial::Trial(std::uint64_t its_seed, int num_gpus) : seed(its_seed), gpus(num_gpus) {
  test::Numbers numbers(mix64(seed));
  harm = draw<Harm>(numbers,
                    {{Harm::kKill, 6}, {Harm::kStop, 7}, {Harm::kExit, 5}, {Harm::kInterrupt, 2}});
  exit_code = numbers.between(0, 1) * 3;
  const bool one_host = numbers.between(0, 9) < 6 || gpus > 0;
  scene = draw<Scene>(numbers, {{Scene::kPass, 3},
                                {Scene::kCollective, 4},
                                {Scene::kExchange, 3},
                                {Scene::kHeap, one_host ? 3 : 0},
                                {Scene::kClose, 2},
                                {Scene::kStart, 3},
                                {Scene::kMixed, 6}});
  launched = numbers.between(0, 3) == 0;
  if (gpus > 0) {
    scene = draw<Scene>(numbers, {{Scene::kPass, 1}, {Scene::kMixed, 2}});
    launched = false;
    ranks = numbers.between(2, gpus);
  } else if (one_host) {
    ranks = numbers.between(2, kMostRanks);
  } else {
    hosts = numbers.between(2, kMostHosts);
    ranks = hosts * numbers.between(1, kMostRanks / hosts);
  }
  victim = numbers.between(0, ranks - 1);
  acts = draw_acts(numbers, scene, one_host);
  if (gpus > 0) {
    acts = {Act::kPass};
    if (scene == Scene::kMixed) acts.push_back(Act::kBarrier);
  }
  threads = numbers.between(1, 2);
  heap_shift = numbers.between(1, ranks - 1);
  for (int r = 0; r < ranks; ++r) {
    avoids_victim.push_back(scene == Scene::kMixed && numbers.between(0, 1) == 1);
    arrival.emplace_back(scene == Scene::kStart ? numbers.between(0, 3) * numbers.between(0, 100)
                                                : 0);
  }
  const bool has_steps = uses(Act::kPass, Act::kCombine) && gpus == 0;
  how = draw<How>(numbers, {{How::kFromOutside, 2},
                            {How::kBeforeAct, scene == Scene::kPass ? 0 : 1},
                            {How::kAtStep, has_steps && scene != Scene::kClose ? 2 : 0}});
  moment = std::chrono::microseconds(numbers.between(0, scene == Scene::kStart   ? 400'000
                                                        : scene == Scene::kClose ? 8'000
                                                                                 : 20'000));
  step = static_cast<ProtocolStep::Kind>(
      numbers.between(0, static_cast<int>(ProtocolStep::Kind::kWait)));
  at = numbers.between(0, 10);
  if (scene == Scene::kClose) {
    rounds = numbers.between(2, 3);
    if (uses(Act::kPass, Act::kPass)) closing.push_back(Act::kCloseLayer);
    if (uses(Act::kDispatch, Act::kDispatch)) closing.push_back(Act::kCloseExchange);
    if (uses(Act::kHeapRing, Act::kHeapBarrier)) closing.push_back(Act::kCloseHeap);
    closing.push_back(Act::kCloseWorld);
  }
  // A program may return between calls only. All other trials are what they were before there was
  // this harm.
  if (gpus == 0 && scene != Scene::kClose && scene != Scene::kStart &&
      mix64(seed ^ kReturns) % 8 == 0) {
    harm = Harm::kReturn;
    how = How::kBeforeAct;
  }
  const std::vector<Act>& choices = scene == Scene::kClose ? closing : acts;
  act = numbers.between(0, static_cast<int>(choices.size()) - 1);
}

bool Trial::uses(Act first, Act last) const {
  return std::ranges::any_of(acts, [&](Act one) { return one >= first && one <= last; });
}

std::string Trial::kind() const {
  return fmt::format("{} in {}, {}{}{}", to_string(harm), to_string(scene),
                     hosts == 1 ? "one host" : "several hosts", gpus > 0 ? ", GPUs" : "",
                     launched ? ", launched" : "");
}

std::string Trial::words() const {
  std::string text = fmt::format("{}: rank {} of {}", kind(), victim, ranks);
  if (hosts > 1) text += fmt::format(" on {} hosts", hosts);
  text += ", acts";
  for (const Act one : acts) text += fmt::format(" [{}]", to_string(one));
  switch (how) {
    case How::kFromOutside: return text + fmt::format(", from outside at {} us", moment.count());
    case How::kBeforeAct:
      if (scene == Scene::kStart) return text + ", before it comes";
      return text +
             fmt::format(", by itself before act {} ({})", act,
                         to_string((scene == Scene::kClose ? closing
                                                           : acts)[static_cast<std::size_t>(act)]));
    case How::kAtStep:
      return text +
             fmt::format(", by itself at step kind {}, number {}", static_cast<int>(step), at);
  }
  return text;
}

}  // namespace switchyard::failures
