//! Any sequence of calls, against a model in f64. Values are small integers, so that every sum is exact.

use gradacc::{
    DType, Error, GradientAccumulator, Gradients, Lengths, OnNonFinite, ParamId, ParamSpec, Reduction, Schedule,
    TensorView, Weight, WindowError,
};
use proptest::prelude::*;

const LEN: usize = 3;

#[derive(Clone, Debug)]
enum Call {
    Register,
    Add { params: Vec<usize>, value: i8, weight: u8, scale: Option<i8>, bad: Bad, in_parts: bool },
    Take { scale: bool, hold: bool },
    Drop,
    Reset,
    SetSchedule(Option<u8>),
    SaveAndLoad { by_file: bool },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bad {
    No,
    Shape,
    Id,
    Twice,
    NonFinite,
}

fn call() -> impl Strategy<Value = Call> {
    let bad = prop_oneof![
        6 => Just(Bad::No), 1 => Just(Bad::Shape), 1 => Just(Bad::Id), 1 => Just(Bad::Twice), 2 => Just(Bad::NonFinite)
    ];
    let add = (
        proptest::collection::btree_set(0..4usize, 0..4),
        -8..8i8,
        0..4u8,
        proptest::option::of(-2..3i8),
        bad,
        proptest::bool::weighted(0.2),
    );
    prop_oneof![
        1 => Just(Call::Register),
        8 => add.prop_map(|(params, value, weight, scale, bad, in_parts)| {
            Call::Add { params: params.into_iter().collect(), value, weight, scale, bad, in_parts }
        }),
        3 => any::<(bool, bool)>().prop_map(|(scale, hold)| Call::Take { scale, hold }),
        1 => Just(Call::Drop),
        1 => Just(Call::Reset),
        1 => proptest::option::of(1..4u8).prop_map(Call::SetSchedule),
        1 => any::<bool>().prop_map(|by_file| Call::SaveAndLoad { by_file }),
    ]
}

/// What a window should hold.
#[derive(Clone, Default)]
struct Model {
    params: usize,
    schedule: Option<u64>,
    index: u64,
    /// Fixed by the first micro-batch.
    every: Option<Option<u64>>,
    count: u64,
    weight: f64,
    rejected: u64,
    has_sums: bool,
    sums: Vec<Option<f64>>,
}

impl Model {
    fn open(&mut self) {
        let (params, schedule, index) = (self.params, self.schedule, self.index);
        *self = Self { params, schedule, index, sums: vec![None; params], ..Self::default() };
    }

    fn is_complete(&self) -> bool {
        self.every.flatten().is_some_and(|every| self.count >= every)
    }
}

struct Machine {
    accumulator: GradientAccumulator,
    policy: OnNonFinite,
    reduction: Reduction,
    model: Model,
    /// What was handed over, and what it must stay.
    held: Vec<(Gradients, Vec<(usize, f64)>)>,
    file: tempfile::NamedTempFile,
}

fn dtype(param: usize) -> DType {
    if param.is_multiple_of(2) { DType::F32 } else { DType::F64 }
}

fn schedule(every: Option<u64>) -> Schedule {
    every.map_or(Schedule::Open, |every| Schedule::FromWindow(Lengths::new([(0, every)]).unwrap()))
}

impl Machine {
    fn new(every: Option<u64>, policy: OnNonFinite, reduction: Reduction) -> Self {
        let accumulator = Self::build(every, policy, reduction, 0);
        let model = Model { schedule: every, ..Model::default() };
        let file = tempfile::NamedTempFile::new().unwrap();
        Self { accumulator, policy, reduction, model, held: Vec::new(), file }
    }

    fn build(every: Option<u64>, policy: OnNonFinite, reduction: Reduction, params: usize) -> GradientAccumulator {
        let builder =
            GradientAccumulator::builder().schedule(schedule(every)).on_nonfinite(policy).reduction(reduction);
        let spec = |param| ParamSpec::new(ParamId(param as u64), &[LEN], dtype(param));
        (0..params).fold(builder, |builder, param| builder.spec(spec(param))).build().unwrap()
    }

    fn run(&mut self, call: &Call) {
        match call {
            Call::Register => {
                let param = self.model.params;
                self.accumulator.register(ParamSpec::new(ParamId(param as u64), &[LEN], dtype(param))).unwrap();
                self.model.params += 1;
                self.model.sums.push(None);
            }
            Call::Add { params, value, weight, scale, bad, in_parts } => {
                self.add(params, f64::from(*value), f64::from(*weight), scale.map(f64::from), *bad, *in_parts);
            }
            Call::Take { scale, hold } => self.take(*scale, *hold),
            Call::Drop => drop(self.held.pop()),
            Call::Reset => {
                self.accumulator.reset();
                self.model.open();
            }
            Call::SetSchedule(every) => {
                self.model.schedule = every.map(u64::from);
                self.accumulator.set_schedule(schedule(self.model.schedule));
            }
            Call::SaveAndLoad { by_file } => {
                let Model { schedule, params, .. } = self.model;
                let mut other = Self::build(schedule, self.policy, self.reduction, params);
                if *by_file {
                    self.accumulator.save(self.file.path()).unwrap();
                    other.load(self.file.path()).unwrap();
                } else {
                    other.load_state(&self.accumulator.state().unwrap()).unwrap();
                }
                self.accumulator = other;
            }
        }
        self.check();
    }

    fn add(&mut self, params: &[usize], value: f64, weight: f64, scale: Option<f64>, bad: Bad, in_parts: bool) {
        let params: Vec<usize> = params.iter().copied().filter(|&param| param < self.model.params).collect();
        let factor = scale.unwrap_or(weight);
        let bad = if params.is_empty() { Bad::No } else { bad };
        let number = if bad == Bad::NonFinite { f64::NAN } else { value };
        let (single, double) = ([number as f32; LEN], [number; LEN]);
        let view = |param: usize| match dtype(param) {
            DType::F32 => TensorView::from_slice(&single, &[LEN]).unwrap(),
            _ => TensorView::from_slice(&double, &[LEN]).unwrap(),
        };
        let mut batch: Vec<_> = params.iter().map(|&param| (ParamId(param as u64), view(param))).collect();
        match bad {
            Bad::Shape => batch.last_mut().unwrap().1 = TensorView::from_slice(&single[..2], &[2]).unwrap(),
            Bad::Id => batch.push((ParamId(1000), view(0))),
            Bad::Twice => batch.push(batch[0].clone()),
            Bad::No | Bad::NonFinite => {}
        }
        let weight_of = Weight::new(weight).unwrap();
        let weight_of = scale.map_or(weight_of, |scale| weight_of.with_scale(scale).unwrap());
        if in_parts && self.policy != OnNonFinite::Skip && matches!(bad, Bad::No) {
            return self.add_parts(&params, &batch, weight_of, value);
        }
        let added = self.accumulator.add(&batch, weight_of);
        let is_nonfinite = bad == Bad::NonFinite && factor != 0.0;
        match (bad, self.policy) {
            // Ids are looked up before the window is asked.
            (Bad::Id, _) => assert!(matches!(added, Err(Error::UnknownParameter { .. }))),
            _ if self.model.is_complete() => {
                assert!(matches!(added, Err(Error::Window(WindowError::Complete { .. }))));
            }
            (Bad::Shape, _) => assert!(matches!(added, Err(Error::Tensor { .. }))),
            (Bad::Twice, _) => assert!(matches!(added, Err(Error::DuplicateParameter { .. }))),
            (_, OnNonFinite::Raise) if is_nonfinite => assert!(matches!(added, Err(Error::NonFinite { .. }))),
            (_, OnNonFinite::Skip) if is_nonfinite => {
                assert!(added.unwrap().is_skipped());
                self.model.every.get_or_insert(self.model.schedule);
                self.model.rejected += 1;
            }
            _ => {
                self.count(&params, if factor == 0.0 { 0.0 } else { factor * number }, weight, factor);
                assert_eq!(added.unwrap().is_complete(), self.model.is_complete());
            }
        }
    }

    /// Every gradient twice, in parts.
    fn add_parts(&mut self, params: &[usize], batch: &[(ParamId, TensorView<'_>)], weight: Weight, value: f64) {
        let Ok(mut micro_batch) = self.accumulator.micro_batch(weight) else {
            return assert!(self.model.is_complete());
        };
        for _ in 0..2 {
            batch.iter().for_each(|entry| micro_batch.add_part(std::slice::from_ref(entry)).unwrap());
        }
        let added = micro_batch.end().unwrap();
        let factor = weight.scale();
        self.count(params, 2.0 * factor * value, weight.weight(), factor);
        assert_eq!(added.is_complete(), self.model.is_complete());
    }

    fn count(&mut self, params: &[usize], term: f64, weight: f64, factor: f64) {
        let model = &mut self.model;
        model.every.get_or_insert(model.schedule);
        model.count += 1;
        model.weight += weight;
        model.has_sums |= factor != 0.0 && !params.is_empty();
        for &param in params {
            let sum = &mut model.sums[param];
            *sum = Some(sum.unwrap_or(0.0) + term);
        }
    }

    fn take(&mut self, scale: bool, hold: bool) {
        let model = &mut self.model;
        let divisor = match self.reduction {
            Reduction::Mean if model.weight > 0.0 => model.weight,
            _ => 1.0,
        };
        let taken = self.accumulator.take();
        if model.count == 0 {
            return assert!(matches!(taken, Err(Error::Window(WindowError::Empty { .. }))));
        }
        if self.reduction == Reduction::Mean && model.weight == 0.0 && model.has_sums {
            return assert!(matches!(taken, Err(Error::Window(WindowError::NoWeight))));
        }
        let mut gradients = taken.unwrap();
        assert_eq!((gradients.count(), gradients.weight()), (model.count, model.weight));
        let mut expected: Vec<(usize, f64)> =
            model.sums.iter().enumerate().filter_map(|(param, sum)| Some((param, (*sum)? / divisor))).collect();
        if scale {
            gradients.scale(-2.0).unwrap();
            expected.iter_mut().for_each(|(_, value)| *value *= -2.0);
        }
        check(&gradients, &expected);
        if hold {
            self.held.push((gradients, expected));
        }
        self.model.index += 1;
        self.model.open();
    }

    fn check(&self) {
        let (accumulator, model) = (&self.accumulator, &self.model);
        assert_eq!(accumulator.window(), model.index);
        assert_eq!((accumulator.count(), accumulator.rejected()), (model.count, model.rejected));
        assert_eq!((accumulator.weight(), accumulator.is_complete()), (model.weight, model.is_complete()));
        self.held.iter().for_each(|(gradients, expected)| check(gradients, expected));
    }
}

/// All elements are what they must be, within the rounding of the hand-over.
fn check(gradients: &Gradients, expected: &[(usize, f64)]) {
    assert_eq!(gradients.params(), expected.iter().map(|&(param, _)| param).collect::<Vec<_>>());
    for &(param, value) in expected {
        let gradient = gradients.get(ParamId(param as u64)).unwrap().unwrap();
        let got: Vec<f64> = match dtype(param) {
            DType::F32 => gradient.as_slice::<f32>().unwrap().iter().map(|&x| f64::from(x)).collect(),
            _ => gradient.as_slice::<f64>().unwrap().to_vec(),
        };
        for x in got {
            assert!((x - value).abs() <= 1e-6 * value.abs() || (x.is_nan() && value.is_nan()), "{x} {value}");
        }
    }
}

proptest! {
    // 250 × 40 calls on average.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(250) })]

    #[test]
    fn any_sequence_of_calls_agrees_with_the_model(
        every in proptest::option::of(1..4u64),
        policy in prop_oneof![Just(OnNonFinite::Propagate), Just(OnNonFinite::Raise), Just(OnNonFinite::Skip)],
        reduction in prop_oneof![Just(Reduction::Mean), Just(Reduction::Sum)],
        calls in proptest::collection::vec(call(), 20..60),
    ) {
        let mut machine = Machine::new(every, policy, reduction);
        machine.run(&Call::Register);
        machine.run(&Call::Register);
        calls.iter().for_each(|call| machine.run(call));
    }
}
