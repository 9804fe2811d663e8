{
  description = "Flake for the optimizer kernel";

  # The edition in build.toml moves together with this commit.
  inputs.kernel-builder.url = "github:huggingface/kernels/8ac69fc542a4306eade0759ef7c45b4f2ae57df0";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
      # What the tests import beside torch and pytest: they load the kernel as users do.
      pythonCheckInputs = python: [ python.kernels python.numpy ];
      # The builder also has releases of torch that it bundles nothing for. Without them, what
      # ciTests runs and redistributable rebuilds is what the bundle holds.
      torchVersions = builtins.filter (version: version.bundleBuild);
    };
}
