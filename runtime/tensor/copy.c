/* Copies on one device, with conversions, strides and broadcasts, and between views that overlap. */
#include "tensor.h"

struct nib_copy_params nib_copy_params_of(const nib_tensor *destination, const nib_tensor *source) {
  struct nib_copy_params params = { .source = nib_tensor_data(source),
                                    .destination = nib_tensor_data(destination),
                                    .source_type = (int32_t)source->dtype,
                                    .destination_type = (int32_t)destination->dtype };
  for (int32_t i = 0; i < destination->ndim; i++) {
    int64_t size = destination->shape[i], from = source->stride[i], to = destination->stride[i];
    if (size == 1) continue;
    int32_t last = params.ndim - 1;
    if (last >= 0 && params.source_stride[last] == size * from && params.destination_stride[last] == size * to) {
      params.size[last] *= size;
      params.source_stride[last] = from;
      params.destination_stride[last] = to;
    } else {
      params.size[params.ndim] = size;
      params.source_stride[params.ndim] = from;
      params.destination_stride[params.ndim++] = to;
    }
  }
  return params;
}

nib_status nib_check_copy(nib_tensor *destination, nib_tensor *source, nib_tensor *view) {
  nib_runtime *rt = nib_tensor_runtime(destination);
  nib_status status = nib_enter(rt);
  if (status == NIB_OK) status = nib_check_destination("tensor:copy", "destination", destination);
  if (status != NIB_OK) return status;
  char want[NIB_DESCRIPTION], have[NIB_DESCRIPTION];
  *view = *source;
  bool fits = source->ndim <= destination->ndim;
  view->ndim = destination->ndim;
  for (int32_t i = 0; fits && i < destination->ndim; i++) {
    int32_t from = i - (destination->ndim - source->ndim);
    int64_t size = from >= 0 ? source->shape[from] : 1;
    fits = size == destination->shape[i] || size == 1;
    view->shape[i] = destination->shape[i];
    view->stride[i] = from >= 0 && size != 1 ? source->stride[from] : 0;
  }
  if (!fits)
    return nib_fail(rt, NIB_INVALID, "tensor:copy: source: expected a tensor expandable to the shape of %s, got %s",
                    nib_describe(destination, want, sizeof want), nib_describe(source, have, sizeof have));
  if (nib_tensor_runtime(source) != rt)
    return nib_fail(rt, NIB_INVALID, "tensor:copy: source: expected a tensor of the same runtime, got one of another");
  return NIB_OK;
}

/* Copies between views that may share elements, as if all elements were read before any is written. */
static nib_status copy_overlapping(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  nib_tensor *read;
  nib_status status = nib_tensor_create(stream->device, source->dtype, source->ndim, source->shape, &read);
  if (status != NIB_OK) return status;
  status = nib_copy_here(stream, read, source);
  if (status == NIB_OK) status = nib_copy_here(stream, destination, read);
  nib_tensor_release(read);
  return status;
}

nib_status nib_copy_here(nib_stream *stream, nib_tensor *destination, nib_tensor *source) {
  nib_tensor view;
  nib_status status = nib_check_device("tensor:copy", "destination", destination, stream);
  if (status == NIB_OK) status = nib_check_copy(destination, source, &view);
  if (status == NIB_OK) status = nib_check_device("tensor:copy", "source", source, stream);
  if (status != NIB_OK) return status;
  if (nib_tensor_numel(destination) == 0 || nib_tensor_same_view(destination, source))
    return nib_check_stream(stream, "tensor:copy");
  if (nib_tensor_overlaps(destination, source)) return copy_overlapping(stream, destination, source);
  struct nib_copy_params params = nib_copy_params_of(destination, &view);
  nib_access accesses[] = { { destination, true, "destination", NULL }, { source, false, "source", NULL } };
  return nib_submit(stream, "tensor:copy", &(struct nib_work){ NIB_WORK(COPY, params) }, accesses, 2);
}
