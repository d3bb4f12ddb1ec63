//! Bytes per second of `add` on one thread at the SIMD level that `GRADACC_SIMD` forces, from the first-level cache to
//! memory. Counted: the gradient read, the sum read and written.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gradacc::{DType, Element, GradientAccumulator, ParamId, TensorView, Weight, bf16, f16};

/// Elements: f32 gradients and sums of so many fill half of a first-level cache, a second-level one, and neither.
const LENGTHS: [usize; 4] = [1 << 12, 1 << 17, 1 << 21, 1 << 26];

fn add<T: Element>(criterion: &mut Criterion, level: &str, value: T, sums: DType) {
    let mut group = criterion.benchmark_group(format!("{} to {sums}, {level}", T::DTYPE));
    for len in LENGTHS {
        let builder = GradientAccumulator::builder().param(ParamId(0), &[len], T::DTYPE).dtype(sums);
        let (mut accumulator, gradient) = (builder.build().unwrap(), vec![value; len]);
        let micro_batch = [(ParamId(0), TensorView::from_slice(&gradient, &[len]).unwrap())];
        accumulator.add(&micro_batch[..], Weight::ONE).unwrap();
        let len_bytes = len * (T::DTYPE.len_bytes() + 2 * sums.len_bytes());
        group.throughput(Throughput::Bytes(len_bytes as u64));
        group.bench_with_input(BenchmarkId::from_parameter(len), &len, |bencher, _| {
            bencher.iter(|| accumulator.add(&micro_batch[..], Weight::ONE).unwrap());
        });
    }
}

fn all(criterion: &mut Criterion) {
    let level = match gradacc::simd_level() {
        Ok(level) => level.name(),
        Err(error) => return println!("not measured: {error}"),
    };
    gradacc::set_num_threads(1).unwrap();
    add(criterion, level, f16::ONE, DType::F32);
    add(criterion, level, bf16::ONE, DType::F32);
    add(criterion, level, 1.0_f32, DType::F32);
    add(criterion, level, 1.0_f32, DType::F64);
    add(criterion, level, 1.0_f64, DType::F64);
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = all
}
criterion_main!(benches);
