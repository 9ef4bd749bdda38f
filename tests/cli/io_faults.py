#!/usr/bin/env python3
"""io_faults.py ZEROPLAN: the NVMe tier fails in the middle of a training step, in a running program.

Faults are real ones, met by a file in use: its end is cut off (/proc/PID/fd), a limit of the file size appears
(prlimit), a small tmpfs fills after a hole was punched into it, an ext4 goes down and answers EIO. Each ends every
rank, threads or processes, with exit code 3 and a named error, at once (who waited for a rank that is gone would wait ten
minutes), and the checkpoint before it resumes.
What needs rights that this process lacks is skipped by name; exit 77 when nothing ran.
"""
import ctypes, fcntl, json, os, pty, re, resource, shutil, socket, subprocess, sys, tempfile, threading, time

LIMIT_S = 60  # of what takes less than a second when nobody else uses the machine
program = os.path.realpath(sys.argv[1])
checks = failures = faults = 0


def expect(what, good, why=''):
    global checks, failures
    checks += 1
    if not good:
        failures += 1
        print(f'FAILED: {what}\n  {why}')
    return good


def skip(what, why):
    print(f'skipped: {what}: {why}')


def run(*arguments):
    return subprocess.run([program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=600)


class Job:
    """A training run that does not end by itself; as threads, or one process a rank. Its progress is read from a
    terminal: that of rank 0."""

    def __init__(self, plan, checkpoints, disk, as_processes, ranks=2):
        self.text, self.step, self.ended = '', 0, None
        command = [program, 'run', plan, '--data', 'synthetic', '--steps', '100000000', '--nvme-dir', disk, '--checkpoint',
                   checkpoints, '--checkpoint-every', '100000000', '--resume']
        # The store listens on the port after MASTER_PORT. While this socket has it the system gives it to nobody else.
        self.reserved = socket.socket()
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(('', 0))
        port = self.reserved.getsockname()[1] - 1
        self.processes = []
        main, terminal = pty.openpty()
        for rank in range(ranks if as_processes else 1):
            environment = dict(os.environ)
            if as_processes:
                environment.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR='127.0.0.1',
                                   MASTER_PORT=str(port))
            error = terminal if rank == 0 else open(f'err.{rank}', 'w')
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                                   stderr=error, env=environment))
        os.close(terminal)
        self.reader = threading.Thread(target=self.read, args=(main,))
        self.reader.start()

    def read(self, main):
        while True:
            try:
                data = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            self.text = (self.text + data.decode(errors='replace'))[-20000:]
            steps = re.findall(r'step (\d+)/', self.text)
            if steps:
                self.step = int(steps[-1])
        os.close(main)

    def wait_step(self, step):
        deadline = time.time() + 200
        while self.step < step and time.time() < deadline and all(p.poll() is None for p in self.processes):
            time.sleep(0.01)
        return self.step >= step

    def scratch_file(self, disk):
        """The way to a file without a name in `disk`: of the last rank, or of some rank where ranks are threads."""
        found = ''
        for p in self.processes:
            folder = f'/proc/{p.pid}/fd'
            for number in os.listdir(folder):
                try:
                    target = os.readlink(f'{folder}/{number}')
                except OSError:
                    continue
                if target.startswith(os.path.realpath(disk) + '/') and '(deleted)' in target:
                    found = f'{folder}/{number}'
        return found

    def end(self):
        """Exit codes and the seconds until the last came."""
        begin, codes = time.time(), []
        for p in self.processes:
            try:
                codes.append(p.wait(timeout=max(0.1, begin + 2 * LIMIT_S - time.time())))
            except subprocess.TimeoutExpired:
                p.kill()
                codes.append('hangs')
        seconds = time.time() - begin
        self.reader.join()
        self.reserved.close()
        errors = [self.text.replace('\r', '\n')]
        errors += [open(f'err.{rank}').read() for rank in range(1, len(self.processes))]
        return codes, seconds, [[line for line in e.split('\n') if 'zeroplan: ' in line] for e in errors]


def tree(folder):
    """{path: contents} but for the lock."""
    return {os.path.join(root, f): open(os.path.join(root, f), 'rb').read()
            for root, _, files in os.walk(folder) for f in files if f != 'lock'}


def check_fault(name, disk, fault, words, prepare=None):
    """`fault(job)` strikes in a step; every rank must say one of `words`. `prepare()` returns why it cannot be, or an
    empty text, and is called before each run."""
    global faults
    plan = 'plan/plan.json'
    for as_processes in (False, True):
        why = prepare() if prepare else ''
        if why:
            return skip(name, why)
        what = f'{name}, ranks as {"processes" if as_processes else "threads"}'
        checkpoints = f'ck-{name}-{as_processes}'.replace(' ', '-')
        first = run('run', plan, '--data', 'synthetic', '--steps', '2', '--nvme-dir', disk, '--checkpoint', checkpoints)
        if not expect(f'{what}: a checkpoint before it', first.returncode == 0, first.stderr):
            continue
        stored = tree(checkpoints)
        job = Job(plan, checkpoints, disk, as_processes)
        if expect(f'{what}: training runs', job.wait_step(6), job.text):
            faults += 1
            fault(job)
        codes, seconds, errors = job.end()
        expect(f'{what}: exit 3 everywhere', all(c == 3 for c in codes), f'{codes} {errors}')
        expect(f'{what}: in under {LIMIT_S} s', seconds < LIMIT_S, f'{seconds:.1f} s')
        for rank, lines in enumerate(errors):
            expect(f'{what}: rank {rank} says why in a line', len(lines) == 1 and re.search(words, lines[0]), str(lines))
        expect(f'{what}: the checkpoint is as it was', tree(checkpoints) == stored)
        again = run('run', plan, '--data', 'synthetic', '--steps', '1', '--nvme-dir', tempfile.gettempdir(), '--checkpoint',
                    checkpoints, '--resume', '--json')
        good = again.returncode == 0
        expect(f'{what}: and resumes', good, again.stderr)
        if good:
            losses.setdefault('resumed', json.loads(again.stdout)['losses'])
            expect(f'{what}: with the same loss', json.loads(again.stdout)['losses'] == losses['resumed'])


losses = {}


def cut_file(job):
    os.truncate(job.scratch_file('disk'), 4096)


def limit_size(job):
    resource.prlimit(job.processes[-1].pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))


FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
libc = ctypes.CDLL(None, use_errno=True)


def fill_disk(job):
    """Gives the file's blocks back and takes them for another: writes then find no room."""
    deadline = time.time() + LIMIT_S
    with open(job.scratch_file('mounted'), 'r+b') as scratch, open('mounted/filler', 'wb') as filler:
        size = ctypes.c_long(os.fstat(scratch.fileno()).st_size)
        while all(p.poll() is None for p in job.processes) and time.time() < deadline:
            libc.fallocate(scratch.fileno(), FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, ctypes.c_long(0), size)
            try:
                while True:
                    os.write(filler.fileno(), b'x' * 4096)
            except OSError:
                time.sleep(0.05)


EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH = 0x8004587d, 2  # _IOR('X', 125, __u32)


def shut_down(job):
    folder = os.open('mounted', os.O_RDONLY)
    fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH.to_bytes(4, sys.byteorder))
    os.close(folder)


def fails(*command):
    """What a command that fails says; an empty text if it does not fail."""
    if not shutil.which(command[0]):
        return f'{command[0]} not found'
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return (done.stderr.strip() or f'{command[0]} failed') if done.returncode else ''


def small_disk():
    fails('umount', 'mounted')
    return fails('mount', '-t', 'tmpfs', '-o', 'size=4m', 'none', 'mounted')


def ext4_disk():
    fails('umount', 'mounted')
    with open('image', 'wb') as image:
        image.truncate(64 << 20)
    return fails('mkfs.ext4', '-q', '-F', 'image') or fails('mount', '-o', 'loop', 'image', 'mounted')


def main():
    model = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'hidden_size': 64, 'intermediate_size': 176,
             'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'vocab_size': 256,
             'max_position_embeddings': 128, 'rms_norm_eps': 1e-5, 'hidden_act': 'silu', 'tie_word_embeddings': False}
    json.dump(model, open('model.json', 'w'))
    plan = run('plan', '--model', 'model.json', '--gpus', '2x3090-24G', '--host-memory', '64GiB', '--seq-len', '32',
               '--micro-batch', '2', '--global-batch', '4', '--precision', 'fp32', '--zero', '3', '--offload',
               'optimizer:nvme', '--nvme', '1x1TB@3GB/s', '--out', 'plan')
    expect('a plan with states on NVMe', plan.returncode == 0, plan.stderr)
    os.mkdir('disk')
    os.mkdir('mounted')
    check_fault('the file is cut', 'disk', cut_file, r'disk/.*cut it')
    check_fault('a limit of the file size', 'disk', limit_size, r'disk/.*limit of a file')
    check_fault('a full disk', 'mounted', fill_disk, r'mounted/.*No space left on device', small_disk)
    check_fault('EIO', 'mounted', shut_down, r'mounted/.*Input/output error', ext4_disk)
    fails('umount', 'mounted')
    print(f'{checks} checks, {failures} failed, {faults} faults')
    return 1 if failures else 77 if faults == 0 else 0


# Mounts live in a namespace of this script.
if os.environ.get('ZEROPLAN_INSIDE') is None and not fails('unshare', '--mount', 'true'):
    os.environ['ZEROPLAN_INSIDE'] = '1'
    os.execvp('unshare', ['unshare', '--mount', sys.executable, *sys.argv])
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    try:
        code = main()
    finally:
        os.chdir('/')
sys.exit(code)
