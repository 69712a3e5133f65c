// The arguments of an indexer call as the kernels take them, and the sharing out of work. Generic code only.
//
// A task is a block of rows of one batch entry and a range of keys. Which thread runs a task, and how many there are,
// changes nothing: scores do not depend on it (see mqa.h), and the choice of keys is by a total order.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mqa_api.h"
#include "plan.h"

namespace ascend_deep_cpu {

using Optional = std::optional<Tensor>;

// An Mqa, and what keeps the memory alive that its pointers point at.
struct MqaCall {
  Mqa a{};
  std::vector<Tensor> kept;
  std::vector<int64_t> start, end, table;

  const Tensor& keep(Tensor t) {
    kept.push_back(std::move(t));
    return kept.back();
  }
};

// q [B, S, H, D] of a format ("plain", "fp8", "fp4"; the last two as bytes), its scales, weights [B, S, H].
void mqa_queries(MqaCall& c, const Tensor& q, const std::string& format, const Optional& sf, const Tensor& weights,
                 double scale);
// kv [B, T, D], key ranges [B or 1, S], a mask [B or 1, S or 1, T].
void mqa_keys(MqaCall& c, const Tensor& kv, const std::string& format, const Optional& sf, const Optional& ks,
              const Optional& ke, const Optional& mask);
// A cache [P, block_kv, 1, W] of format `fmt`, lengths [B, S], page ids [R, columns], rows of those [B].
void mqa_pages(MqaCall& c, const Tensor& kv_cache, const std::string& fmt, const Tensor& context_lens,
               const Tensor& block_table, const Optional& indices, int64_t max_context_len);

struct MqaShares {
  int64_t blocks, splits, keys;  // row blocks of a batch entry; key ranges, and keys in each
  MqaShares(const Mqa& a, int64_t panel);
  int64_t tasks(const Mqa& a) const { return a.batch * blocks * splits; }
};

struct MqaTask {
  int64_t batch, s0, s1, split, k0, k1;
};

// Runs every task, the next one on whichever thread is free.
void mqa_run(const Mqa& a, const MqaShares& shares, const std::function<void(const MqaTask&)>& run);

}  // namespace ascend_deep_cpu
