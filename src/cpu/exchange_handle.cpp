#include "cpu/exchange_handle.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "switchyard/error.h"

namespace switchyard::cpu {

using protocol::ExchangeEntry;
using protocol::SlotEntry;

void DispatchHandle::list_slots(const ExchangeProblem& problem, const RankLink& link) {
  const auto ranks = static_cast<std::size_t>(problem.num_ranks);
  const auto top_k = static_cast<std::size_t>(problem.spec.top_k);
  num_tokens_to.assign(ranks, 0);
  entries_to.resize(ranks);
  sent_to.resize(ranks);
  for (SentTokens& sent : sent_to) {
    sent.tokens.clear();
    sent.places.clear();
  }
  // The index of each place's next row in its rank's list; at first the number of its rows.
  std::vector<std::uint32_t> next(static_cast<std::size_t>(problem.places.num_experts));
  for (const std::int32_t place : places) {
    if (place >= 0) ++next[static_cast<std::size_t>(place)];
  }
  for (int r = 0; r < problem.num_ranks; ++r) {
    std::uint32_t rows = 0;
    for (int p = problem.places.begin(r); p < problem.places.end(r); ++p) {
      rows += std::exchange(next[static_cast<std::size_t>(p)], rows);
    }
    entries_to[static_cast<std::size_t>(r)].resize(rows);
  }
  for (std::size_t t = 0; t * top_k < places.size(); ++t) {
    const auto token = static_cast<std::uint32_t>(t);
    std::uint64_t ranks_seen = 0;
    for (std::uint32_t k = 0; k < top_k; ++k) {
      const std::int32_t place = places[t * top_k + k];
      if (place < 0) continue;
      const int to = problem.places.owner(place);
      const auto owner = static_cast<std::size_t>(to);
      SentTokens& sent = sent_to[static_cast<std::size_t>(link.via(to))];
      if (sent.tokens.empty() || sent.tokens.back().token != token) {
        sent.tokens.push_back({token, static_cast<std::uint32_t>(sent.places.size()), 0});
      }
      sent.tokens.back().slots |= std::uint32_t{1} << k;
      if ((ranks_seen >> owner & 1) == 0) {
        ranks_seen |= std::uint64_t{1} << owner;
        sent.places.push_back({to, num_tokens_to[owner]++});
      }
      entries_to[owner][next[static_cast<std::size_t>(place)]++] = {
          SlotEntry::pack(token, k), num_tokens_to[owner] - 1, weights[t * top_k + k]};
    }
  }
}

void DispatchHandle::place_rows(const ExchangeProblem& problem) {
  const auto experts = static_cast<std::size_t>(problem.num_own());
  ends.assign(experts, 0);
  std::int64_t rows = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    const std::int64_t before = rows;
    for (const auto& of_source : count) rows += of_source[e];
    ends[e] = rows;
    if (problem.spec.layout.kind == RowLayout::Kind::kPadded &&
        rows - before > problem.spec.layout.size) {
      throw Error(ErrorCode::kCapacityExceeded,
                  fmt::format("expert {} got {} rows, and the padded layout has room for {}; make "
                              "an exchange with more (layout.size), or with another layout",
                              static_cast<std::size_t>(problem.own().begin) + e, rows - before,
                              problem.spec.layout.size));
    }
  }
  first_row = first_rows(problem.spec.layout, ends);
  layout_rows = first_row.back();
  end_of_rows = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    const std::int64_t of_expert = ends[e] - (e == 0 ? 0 : ends[e - 1]);
    if (of_expert > 0) end_of_rows = first_row[e] + of_expert;
  }
  arrivals.assign(static_cast<std::size_t>(problem.num_ranks), {});
  by_token.assign(static_cast<std::size_t>(problem.num_ranks), {});
  host_slots.assign(static_cast<std::size_t>(problem.num_ranks), {});
  planned = true;
}

void DispatchHandle::list_arrivals(const ExchangeProblem& problem, const RankLink& link,
                                   const protocol::ExchangeHeap& heap, std::uint64_t dispatch,
                                   int source) {
  const ExchangeEntry* entry = heap.entries(dispatch, source).in(link.heaps().mine());
  auto& of_source = arrivals[static_cast<std::size_t>(source)];
  for (std::size_t e = 0; e < ends.size(); ++e) {
    std::int64_t before = 0;  // rows of ranks below the source
    for (int r = 0; r < source; ++r) before += count[static_cast<std::size_t>(r)][e];
    const std::int64_t packed = (e == 0 ? 0 : ends[e - 1]) + before;
    for (std::uint32_t i = 0; i < count[static_cast<std::size_t>(source)][e]; ++i, ++entry) {
      of_source.push_back({static_cast<std::uint32_t>(first_row[e] + before + i),
                           static_cast<std::uint32_t>(packed + i), entry->position, entry->slot,
                           entry->weight});
    }
  }
  if (link.way_back(source) == RankLink::Return::kSummed) {
    const std::uint32_t* const slots = link.sums_for(source, dispatch & 1).slots;
    auto& slots_of = host_slots[static_cast<std::size_t>(source)];
    for (const Arrival& arrival : of_source) {
      slots_of.push_back(slots[SlotEntry::token(arrival.slot)]);
    }
  }
  if (!are_summed(problem, link, source)) return;
  auto& order = by_token[static_cast<std::size_t>(source)];
  order.resize(of_source.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return of_source[a].slot < of_source[b].slot;
  });
}

}  // namespace switchyard::cpu
