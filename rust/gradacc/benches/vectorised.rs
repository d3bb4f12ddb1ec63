//! Fails if the clones of a kernel for wider instruction sets are not that much faster, in the first-level cache, than
//! the one for every machine: then the compiler has not vectorised them.
//!
//! The one for every machine is vectorised too, with the 4 lanes of SSE2. So AVX2, with twice as many, must be twice as
//! fast; AVX-512, with four times as many, 3 times, since the first-level cache limits it.
//!
//! Each level is measured in a process of its own, this one with `GRADACC_SIMD` set.

use std::process::Command;
use std::time::Instant;

use gradacc::{DType, GradientAccumulator, ParamId, SimdLevel, TensorView, Weight, bf16};

const LEN: usize = 1 << 12;
const AT_LEAST: [(SimdLevel, f64); 2] = [(SimdLevel::Avx2, 2.0), (SimdLevel::Avx512, 3.0)];
const CHILD: &str = "GRADACC_MEASURE_ONE_LEVEL";

fn main() {
    if std::env::var_os(CHILD).is_some() {
        return println!("{}", nanoseconds());
    }
    let baseline = measure(SimdLevel::Scalar);
    for (level, at_least) in AT_LEAST.into_iter().filter(|(level, _)| level.is_available()) {
        let ratio = baseline / measure(level);
        println!("bfloat16 to float32, {LEN} elements: {} is {ratio:.1} times as fast as scalar", level.name());
        assert!(ratio >= at_least, "{} has not been vectorised", level.name());
    }
}

fn measure(level: SimdLevel) -> f64 {
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(program).env(CHILD, "1").env("GRADACC_SIMD", level.name()).output().expect("it starts");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    printed.trim().parse().unwrap_or_else(|_| panic!("{}: {printed}", level.name()))
}

/// What the kernel takes: the time of an add, less that of one that has no elements.
fn nanoseconds() -> f64 {
    add(LEN) - add(0)
}

/// The least of many times: what disturbs only adds to it.
fn add(len: usize) -> f64 {
    let builder = GradientAccumulator::builder().param(ParamId(0), &[len], DType::BF16);
    let (mut accumulator, gradient) = (builder.build().expect("settings are right"), vec![bf16::ONE; len]);
    let mut micro_batch = [(0, TensorView::from_slice(&gradient, &[len]).expect("the shape is right"))];
    let mut least = f64::INFINITY;
    for _ in 0..20_000 {
        let start = Instant::now();
        accumulator.add_batch(&mut micro_batch, Weight::ONE).expect("the gradient fits");
        least = least.min(start.elapsed().as_nanos() as f64);
    }
    least
}
