-- K and V with different head dimensions, 192 and 128, as in attention with a latent K. An append needs K and V of the
-- same dimension. So K and V are appended separately, each with the halves of its rows as K and V. One dequantize reads
-- both.

return {
  title = "K and V with different head dimensions in one cache",
  parameters = {
    head_dim = { 192, min = 32, max = 512, multiple = 32, help = "head dimension of K" },
    v_head_dim = { 128, min = 32, max = 512, multiple = 32, help = "head dimension of V" },
    requests = { 3, min = 1, max = 16, help = "requests" },
    heads = { 2, min = 1, max = 16, help = "KV heads" },
    page_size = { 4, min = 1, max = 64, help = "tokens per page" },
    kv_layout = { "HND", "NHD", help = "layout of the caches" },
    dtype = { "bfloat16", "float16", help = "dtype of K, V and the outputs" },
  },
  steps = 12,

  setup = function(run)
    local p, s = run.p, run.state
    s.max_len = 9 + run.steps
    s.cache = run:cache {
      num_pages = 1 + p.requests * ((s.max_len + p.page_size - 1) // p.page_size), page_size = p.page_size,
        num_kv_heads = p.heads,
      head_dim = p.head_dim, v_head_dim = p.v_head_dim, dtype = p.dtype, kv_layout = p.kv_layout,
        page_layout = "shuffled",
      page_padding = 32, batch = p.requests, max_len = s.max_len, tokens = 24,
    }
    for _ = 1, p.requests do assert(s.cache:admit(1 + run.random(9))) end
    s.cache:flush()
  end,

  step = function(run)
    local cache = run.state.cache
    for _, request in ipairs(cache.live) do assert(cache:extend(request, 1)) end
    cache:load()
  end,

  captured = function(run)
    run.state.cache:append()
    run.state.cache:dequantize()
  end,

  check = function(run)
    local layer = run.state.cache.layers[1]
    local k, v = layer.out[1].shape, layer.out[2].shape
    run:expect(k[4] == run.p.head_dim and v[4] == run.p.v_head_dim, "outputs of %d and %d dimensions", k[4], v[4])
  end,
}
