#include "report/page.h"

#include <fmt/core.h>

#include <cmath>

#include "base/plural.h"
#include "report/assets.h"
#include "report/summary.h"
#include "results/row_file.h"

namespace switchyard::report {
namespace {

Json page_json(const Row& row) {
  Json json = {{"model", row.model},
               {"hidden", row.hidden},
               {"intermediate", row.intermediate},
               {"experts", row.experts},
               {"top_k", row.top_k},
               {"dtype", row.dtype},
               {"compute", row.compute},
               {"routing", row.routing},
               {"machine", row.machine},
               {"card", results::card_of(row.machine)},
               {"ranks", row.ranks},
               {"tokens", row.tokens_per_rank},
               {"beta", row.beta},
               {"beta_reached", row.beta_reached},
               {"median_us", row.median_us},
               {"p10_us", row.p10_us},
               {"p90_us", row.p90_us},
               {"repeats", row.repeats},
               {"touched_bytes", row.touched_bytes},
               {"flops", row.flops},
               {"nvlink_bytes", row.nvlink_bytes},
               {"floor_us", row.floor_us},
               {"rival", nullptr}};
  if (row.rival) {
    json["rival"] = {{"name", row.rival->name},
                     {"median_us", row.rival->median_us},
                     {"p10_us", row.rival->p10_us},
                     {"p90_us", row.rival->p90_us}};
  }
  if (!row.expert_load.empty()) json["expert_load"] = row.expert_load;
  return json;
}

Json page_json(const Published& series) {
  Json times = Json::array();
  for (const auto& [tokens, us] : series.time_us) times.push_back(Json::Array{tokens, us});
  return {{"rival", series.rival},
          {"source", series.source},
          {"model", series.model},
          {"compute", series.compute.empty() ? Json() : Json(series.compute)},
          {"experts", series.experts},
          {"ranks", series.ranks},
          {"time_us", times}};
}

// Writes a slice as ten numbers in a row. Its start is the difference from the slice before. JSON
// objects would be five times as long.
Json page_json(const Track& track) {
  Json numbers = Json::array();
  std::int64_t before = 0;
  for (const Slice& s : track.slices) {
    for (const std::int64_t number :
         {s.start_ns - before, s.end_ns - s.start_ns, s.busy_ns, std::int64_t{s.count},
          std::int64_t{s.name}, s.tile, s.block, s.expert, s.rows, s.peer}) {
      numbers.push_back(number);
    }
    before = s.start_ns;
  }
  return {{"rank", track.rank}, {"id", track.id}, {"name", track.name}, {"slices", numbers}};
}

Json page_json(const Timeline& timeline, const std::string& file) {
  Json ranks = Json::array(), tracks = Json::array(), totals = Json::array();
  for (const RankName& rank : timeline.ranks) {
    ranks.push_back({{"rank", rank.rank}, {"name", rank.name}});
  }
  for (const Track& track : timeline.tracks) tracks.push_back(page_json(track));
  for (const NameTotal& total : timeline.totals) {
    totals.push_back({{"rank", total.rank},
                      {"name", total.name},
                      {"count", total.count},
                      {"total_ns", total.total_ns},
                      {"longest_ns", total.longest_ns}});
  }
  return {{"file", file},
          {"names", timeline.names},
          {"span_ns", timeline.span_ns},
          {"num_slices", timeline.num_slices},
          {"num_other", timeline.num_other},
          {"num_dropped", timeline.num_dropped},
          {"merged_below_ns", timeline.merged_below_ns},
          {"ranks", ranks},
          {"totals", totals},
          {"tracks", tracks}};
}

Json data_of(const PageInput& input, std::span<const Suite> suites) {
  Json json_suites = Json::array();
  for (const Suite& suite : suites) {
    Json rows = Json::array();
    for (const Row* row : suite.rows) rows.push_back(page_json(*row));
    json_suites.push_back({{"name", suite.name}, {"rows", rows}});
  }
  Json published = Json::array();
  for (const Published& series : input.published) published.push_back(page_json(series));
  Json tunings = Json::array();
  for (const Tuning& tuning : input.tunings) tunings.push_back(tuning_json(tuning));
  Json ladders = Json::array();
  for (const Ladder& ladder : input.ladders) ladders.push_back(ladder_json(ladder));
  Json tables = Json::array();
  for (const Table& table : input.tables) {
    tables.push_back({{"file", table.file}, {"rows", table.rows}});
  }
  Json routings = Json::array();
  for (const Routing& routing : input.routings) routings.push_back(routing_json(routing));
  return {{"roofs",
           {{"read_bytes_per_second", input.roofs.read_bytes_per_second},
            {"flops_per_second",
             {{"bf16", input.roofs.bf16_flops_per_second},
              {"fp8", input.roofs.fp8_flops_per_second}}}}},
          {"suites", json_suites},
          {"published", published},
          {"tunings", tunings},
          {"ladders", ladders},
          {"tables", tables},
          {"routings", routings},
          {"timeline", input.timeline ? page_json(*input.timeline, input.trace_file) : Json()}};
}

std::string cell(const std::string& text) { return "<td>" + escape_html(text) + "</td>"; }
std::string number_cell(const std::string& text) {
  return "<td class=\"number\">" + escape_html(text) + "</td>";
}

// Puts each value in an element of its own, one below the other.
std::string list_cell(const std::vector<std::string>& values, const char* open, const char* close) {
  std::string html;
  for (const std::string& value : values) {
    html += fmt::format("{}{}{}{}", html.empty() ? "" : "<br>", open, escape_html(value), close);
  }
  return "<td>" + html + "</td>";
}

std::string point_text(const Row& row) {
  return fmt::format("{}, {}, {}{}, β {:g}", row.model, plural(row.experts, "expert"),
                     plural(row.tokens_per_rank, "token"),
                     row.ranks == 1 ? "" : fmt::format(" on each of {}", plural(row.ranks, "rank")),
                     row.beta);
}

// Returns three cells: the mean, the worst value and its point. They are dashes if no row has the
// ratio.
std::string ratio_cells(const std::optional<Ratio>& ratio, const char* unit) {
  if (!ratio) return number_cell("–") + number_cell("–") + cell("–");
  return number_cell(fmt::format("{:.2f}{}", ratio->mean, unit)) +
         number_cell(fmt::format("{:.2f}{}", ratio->worst, unit)) + cell(point_text(*ratio->at));
}

std::string summary_rows(std::span<const Suite> suites) {
  std::string html;
  for (const Suite& suite : suites) {
    html += fmt::format(
        "<tr><th scope=\"row\"><a href=\"#suite-{0}\">{0}</a></th>{1}{2}{3}{4}</tr>\n",
        escape_html(suite.name), number_cell(fmt::format("{}", suite.rows.size())),
        ratio_cells(suite.time_over_floor, ""), ratio_cells(suite.speed_up, "×"),
        suite.rivals.empty() ? cell("–") : list_cell(suite.rivals, "<span>", "</span>"));
  }
  return html;
}

std::string source_rows(std::span<const Suite> suites) {
  std::string html;
  for (const Suite& suite : suites) {
    html +=
        fmt::format("<tr><th scope=\"row\">{}</th>{}{}{}{}</tr>\n", escape_html(suite.name),
                    list_cell(suite.machines, "<span>", "</span>"),
                    list_cell(suite.commits, "<code class=\"short\">", "</code>"),
                    suite.dates.empty() ? cell("–") : list_cell(suite.dates, "<span>", "</span>"),
                    list_cell(suite.commands, "<code>", "</code>"));
  }
  return html;
}

struct Part {
  std::string_view name;  // as "{{name}}" in the template
  std::string text;
};

// Fills the template in one pass, so that nothing in a part is taken for a placeholder.
std::string fill(std::string_view page, std::span<const Part> parts) {
  std::string filled;
  while (true) {
    const std::size_t open = page.find("{{");
    filled += page.substr(0, open);
    if (open == std::string_view::npos) return filled;
    const std::size_t close = page.find("}}", open);
    const std::string_view name = page.substr(open + 2, close - open - 2);
    for (const Part& part : parts) {
      if (part.name == name) filled += part.text;
    }
    page.remove_prefix(close + 2);
  }
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      case '\'': escaped += "&#39;"; break;
      default: escaped += c;
    }
  }
  return escaped;
}

std::string script_json(const Json& value) {
  // A file's name may be any bytes.
  const std::string text = value.dump();
  std::string escaped;
  escaped.reserve(text.size());
  for (const char c : text) {
    // In JSON, '<' occurs only in strings, and a string may hold it as this escape.
    if (c == '<') {
      escaped += "\\u003c";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::string make_page(const PageInput& input) {
  const std::vector<Suite> suites = suites_of(input.rows);
  std::string files;
  for (const std::string& file : input.files) {
    files += fmt::format("{}<code>{}</code>", files.empty() ? "" : ", ", escape_html(file));
  }
  std::size_t points = input.rows.size();
  for (const Tuning& tuning : input.tunings) points += tuning.profile.points.size();
  for (const Ladder& ladder : input.ladders) points += ladder.rows.size();
  for (const Table& table : input.tables) points += table.size();
  for (const Routing& routing : input.routings) {
    for (const Recording& recording : routing.recordings.layers) points += recording.steps.size();
  }
  const Part parts[] = {{"style", std::string(assets::kStyle)},
                        {"files", files},
                        {"points", fmt::format("{}", points)},
                        {"summary_hidden", input.rows.empty() ? " hidden" : ""},
                        {"summary_rows", summary_rows(suites)},
                        {"source_rows", source_rows(suites)},
                        {"data", script_json(data_of(input, suites))},
                        {"plot", std::string(assets::kPlot)},
                        {"charts", std::string(assets::kCharts)},
                        {"tuning", std::string(assets::kTuning)},
                        {"ladder", std::string(assets::kLadder)},
                        {"tables", std::string(assets::kTables)},
                        {"routing", std::string(assets::kRouting)},
                        {"timeline", std::string(assets::kTimeline)},
                        {"main", std::string(assets::kMain)}};
  return fill(assets::kPage, parts);
}

}  // namespace switchyard::report
