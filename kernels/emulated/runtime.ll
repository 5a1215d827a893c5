; The workers of emulated cards: functions that execute launches, blocks and warps on CPU threads, without Python.
;
; A template: native.py puts values in place of the $-words. A word such as launch.grid.x is a byte offset, here of
; grid.x in the struct LAUNCH; native.py defines the structs LAUNCH, PROGRAM, SCRATCH and POOL, serving.py SERVICE and
; MAIL, and translate.py defines CONTEXT. Entry points: prepare_pool, help, run and serve.

target triple = "$triple"
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_post(ptr)
declare i32 @sem_wait(ptr)
declare i32 @sem_trywait(ptr)
declare i32 @sched_yield()
declare i32 @llvm.ctlz.i32(i32, i1)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @time(ptr)
declare i32 @usleep(i32)
declare i32 @clock_gettime(i32, ptr)
declare i64 @llvm.umin.i64(i64, i64)
$declare_cpu_pause

; Runs one block: first every warp until its first barrier, then in rounds every warp that has not ended. Each call of
; a warp returns its state: 0 when the warp has ended, the number of the barrier where it waits, the number of a polling
; loop plus $gives_way where it gives way to the other warps, or -1 after a trap (translate.py).
; While any warp gives way, a round runs only those that do: warps at a barrier must wait for them.
; Returns 0 when all warps have ended, and -1 after a trap. Where warps do nothing but give way for more seconds than
; the launch's patience, returns the state of the last of them.
define internal i32 @block(ptr %launch, i64 %number, ptr %scratch) {
entry:
  %context = alloca [$context.bytes x i8], align 64
  %params.from = getelementptr i8, ptr %launch, i64 $launch.params
  %params = load ptr, ptr %params.from
  store ptr %params, ptr %context
  %partial.from = getelementptr i8, ptr %launch, i64 $launch.partial
  %partial = load i32, ptr %partial.from
  %whole = icmp eq i32 %partial, 0
  br i1 %whole, label %prepare, label %partial.barriers
partial.barriers:
  %barriers = getelementptr i8, ptr %context, i64 $context.barriers
  store <$barriers.bytes x i8> zeroinitializer, ptr %barriers, align 64
  br label %prepare
prepare:
  %shared = load ptr, ptr %scratch
  %shared.to = getelementptr i8, ptr %context, i64 $context.shared
  store ptr %shared, ptr %shared.to
  %local.from = getelementptr i8, ptr %scratch, i64 $scratch.local
  %local = load ptr, ptr %local.from
  %local.to = getelementptr i8, ptr %context, i64 $context.local
  store ptr %local, ptr %local.to
  %frames.from = getelementptr i8, ptr %scratch, i64 $scratch.frames
  %frames = load ptr, ptr %frames.from
  %frames.to = getelementptr i8, ptr %context, i64 $context.frames
  store ptr %frames, ptr %frames.to
  %states.from = getelementptr i8, ptr %scratch, i64 $scratch.states
  %states = load ptr, ptr %states.from
  %gx.from = getelementptr i8, ptr %launch, i64 $launch.grid.x
  %gy.from = getelementptr i8, ptr %launch, i64 $launch.grid.y
  %gz.from = getelementptr i8, ptr %launch, i64 $launch.grid.z
  %gx = load i32, ptr %gx.from
  %gy = load i32, ptr %gy.from
  %gz = load i32, ptr %gz.from
  %gx.to = getelementptr i8, ptr %context, i64 $context.nctaid.x
  %gy.to = getelementptr i8, ptr %context, i64 $context.nctaid.y
  %gz.to = getelementptr i8, ptr %context, i64 $context.nctaid.z
  store i32 %gx, ptr %gx.to
  store i32 %gy, ptr %gy.to
  store i32 %gz, ptr %gz.to
  %gx64 = zext i32 %gx to i64
  %gy64 = zext i32 %gy to i64
  %first.row = icmp ult i64 %number, %gx64
  br i1 %first.row, label %place.known, label %divide
divide:                                             ; 64-bit divisions are slow; most grids have one row
  %rows = udiv i64 %number, %gx64
  %x.divided = urem i64 %number, %gx64
  %y.divided = urem i64 %rows, %gy64
  %z.divided = udiv i64 %rows, %gy64
  br label %place.known
place.known:
  %x = phi i64 [%number, %prepare], [%x.divided, %divide]
  %y = phi i64 [0, %prepare], [%y.divided, %divide]
  %z = phi i64 [0, %prepare], [%z.divided, %divide]
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  %x.to = getelementptr i8, ptr %context, i64 $context.ctaid.x
  %y.to = getelementptr i8, ptr %context, i64 $context.ctaid.y
  %z.to = getelementptr i8, ptr %context, i64 $context.ctaid.z
  store i32 %x32, ptr %x.to
  store i32 %y32, ptr %y.to
  store i32 %z32, ptr %z.to
  %dynamic.from = getelementptr i8, ptr %launch, i64 $launch.dynamic
  %dynamic = load i32, ptr %dynamic.from
  %dynamic.to = getelementptr i8, ptr %context, i64 $context.dynamic
  store i32 %dynamic, ptr %dynamic.to
  %n.from = getelementptr i8, ptr %launch, i64 $launch.n_warps
  %n = load i32, ptr %n.from
  %warp = load ptr, ptr %launch
  br label %start
start:                                              ; every warp until its first barrier; %all: their states, or-ed
  %i = phi i32 [0, %place.known], [%i.next, %started]
  %all = phi i32 [0, %place.known], [%all.next, %started]
  %s = call i32 %warp(ptr %context, i32 %i, i32 0)
  %trapped = icmp slt i32 %s, 0
  br i1 %trapped, label %fault, label %started
started:
  %i64 = zext i32 %i to i64
  %place = getelementptr i32, ptr %states, i64 %i64
  store i32 %s, ptr %place
  %all.next = or i32 %all, %s
  %i.next = add i32 %i, 1
  %more = icmp ult i32 %i.next, %n
  br i1 %more, label %start, label %again
again:                                              ; %since: the time when all began to give way, or 0
  %seen = phi i32 [%all.next, %started], [%any.next, %rest], [%any.next, %patience]
  %since = phi i64 [0, %started], [0, %rest], [%waited, %patience]
  %over = icmp eq i32 %seen, 0
  br i1 %over, label %end, label %choose
choose:                                             ; %which: the bits of a state that let its warp run
  %some.spin = and i32 %seen, $gives_way
  %none.spins = icmp eq i32 %some.spin, 0
  %which = select i1 %none.spins, i32 -1, i32 $gives_way
  br label %round
round:                                              ; %moved: whether any warp has got to a barrier or its end
  %w = phi i32 [0, %choose], [%w.next, %stepped]
  %any = phi i32 [0, %choose], [%any.next, %stepped]
  %spinner = phi i32 [0, %choose], [%spinner.next, %stepped]
  %moved = phi i1 [%none.spins, %choose], [%moved.next, %stepped]
  %w64 = zext i32 %w to i64
  %w.place = getelementptr i32, ptr %states, i64 %w64
  %state = load i32, ptr %w.place
  %chosen = and i32 %state, %which
  %runs = icmp ne i32 %chosen, 0
  br i1 %runs, label %resume, label %stepped
resume:
  %from = and i32 %state, $gives_way.number
  %r = call i32 %warp(ptr %context, i32 %w, i32 %from)
  store i32 %r, ptr %w.place
  %r.trapped = icmp slt i32 %r, 0
  br i1 %r.trapped, label %fault, label %stepped
stepped:
  %now = phi i32 [%state, %round], [%r, %resume]
  %any.next = or i32 %any, %now
  %still = and i32 %now, $gives_way
  %spins = icmp ne i32 %still, 0
  %spinner.next = select i1 %spins, i32 %now, i32 %spinner
  %arrived = xor i1 %spins, %runs                   ; in these rounds: it ran, and no longer gives way
  %moved.next = or i1 %moved, %arrived
  %w.next = add i32 %w, 1
  %w.last = icmp eq i32 %w.next, %n
  br i1 %w.last, label %rest, label %round
rest:
  br i1 %moved.next, label %again, label %patience
patience:                                           ; every warp that ran gave way again
  %ignored = call i32 @sched_yield()
  %time = call i64 @time(ptr null)
  %first = icmp eq i64 %since, 0
  %waited = select i1 %first, i64 %time, i64 %since
  %seconds = sub i64 %time, %waited
  %most.from = getelementptr i8, ptr %launch, i64 $launch.patience
  %most = load i32, ptr %most.from
  %most64 = zext i32 %most to i64
  %tired = icmp ugt i64 %seconds, %most64
  br i1 %tired, label %stuck, label %again
stuck:
  ret i32 %spinner.next
end:
  ret i32 0
fault:
  ret i32 -1
}

; Works on a program until all its launches are done. Every worker calls it. A worker takes several neighbouring
; blocks at a time, a share: neighbours often read memory in a row, which the processor fetches ahead.
define internal void @work(ptr %program, ptr %scratch) {
entry:
  %n = load i64, ptr %program
  %failed = getelementptr i8, ptr %program, i64 $program.failed
  %list.from = getelementptr i8, ptr %program, i64 $program.launches
  %list = load ptr, ptr %list.from
  %none = icmp eq i64 %n, 0
  br i1 %none, label %end, label %launch
launch:
  %i = phi i64 [0, %entry], [%i.next, %finished]
  %place = getelementptr ptr, ptr %list, i64 %i
  %l = load ptr, ptr %place
  %blocks.from = getelementptr i8, ptr %l, i64 $launch.n_blocks
  %blocks = load i64, ptr %blocks.from
  %next = getelementptr i8, ptr %l, i64 $launch.next
  %done = getelementptr i8, ptr %l, i64 $launch.done
  %share.from = getelementptr i8, ptr %l, i64 $launch.share
  %share = load i64, ptr %share.from
  br label %take
take:                                               ; blocks %first to %first + %share, if the launch has so many
  %first = atomicrmw add ptr %next, i64 %share seq_cst
  %some = icmp ult i64 %first, %blocks
  br i1 %some, label %mine, label %wait
mine:
  %beyond = add i64 %first, %share
  %last = icmp ult i64 %blocks, %beyond
  %stop = select i1 %last, i64 %blocks, i64 %beyond
  br label %check
check:                                              ; after a failure, blocks are only counted
  %b = phi i64 [%first, %mine], [%b.next, %count]
  %bad = load atomic i64, ptr %failed monotonic, align 8
  %skip = icmp ne i64 %bad, 0
  br i1 %skip, label %count, label %go
go:
  %r = call i32 @block(ptr %l, i64 %b, ptr %scratch)
  %fault = icmp ne i32 %r, 0
  br i1 %fault, label %note, label %count
note:                                               ; the program's `failed`: number of the launch in it, from 1
  %why = getelementptr i8, ptr %program, i64 $program.why
  %r64 = sext i32 %r to i64
  store i64 %r64, ptr %why
  %number = add i64 %i, 1
  store atomic i64 %number, ptr %failed monotonic, align 8
  br label %count
count:
  %b.next = add i64 %b, 1
  %goes.on = icmp ult i64 %b.next, %stop
  br i1 %goes.on, label %check, label %counted
counted:
  %mine.done = sub i64 %stop, %first
  %before = atomicrmw add ptr %done, i64 %mine.done seq_cst
  br label %take
wait:                                               ; until the other workers have finished their blocks
  %spins = phi i64 [0, %take], [%spins.next, %spin]
  %finished.blocks = load atomic i64, ptr %done seq_cst, align 8
  %all = icmp uge i64 %finished.blocks, %blocks
  br i1 %all, label %finished, label %pause
pause:
  $cpu_pause
  %spins.next = add i64 %spins, 1
  %patient = icmp ult i64 %spins.next, 2000
  br i1 %patient, label %spin, label %yield
yield:
  %ignored = call i32 @sched_yield()
  br label %spin
spin:
  br label %wait
finished:
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %launch, label %end
end:
  ret void
}

; Makes the semaphore of a pool on which its helpers sleep.
define void @prepare_pool(ptr %pool) {
  %r = call i32 @sem_init(ptr %pool, i32 0, i32 0)
  ret void
}

; A helper's life: it looks for the next program for as long as the pool says (`awake`), while other threads may run.
; Then it sleeps until `run` wakes it. It works on the program that is open, if any, and begins again. It ends where the
; pool is closed: then 1 stands for the program.
define void @help(ptr %pool, ptr %scratch) {
entry:
  %open = getelementptr i8, ptr %pool, i64 $pool.program
  %attached = getelementptr i8, ptr %pool, i64 $pool.attached
  %awake.from = getelementptr i8, ptr %pool, i64 $pool.awake
  %awake = load i64, ptr %awake.from
  br label %rest
rest:
  %since = call i64 @now()
  br label %look
look:
  %none.yet = call i32 @sem_trywait(ptr %pool)
  %called = icmp eq i32 %none.yet, 0
  br i1 %called, label %woken, label %idle
idle:
  %time = call i64 @now()
  %waited = sub i64 %time, %since
  %more = icmp ult i64 %waited, %awake
  br i1 %more, label %wait, label %sleep
wait:
  %ignored.yield = call i32 @sched_yield()
  br label %look
sleep:
  %ignored = call i32 @sem_wait(ptr %pool)
  br label %woken
woken:
  %in = atomicrmw add ptr %attached, i32 1 seq_cst
  %program = load atomic ptr, ptr %open seq_cst, align 8
  %none = icmp eq ptr %program, null
  br i1 %none, label %leave, label %open.or.closed
open.or.closed:
  %address = ptrtoint ptr %program to i64
  %closed = icmp eq i64 %address, 1
  br i1 %closed, label %end, label %join
join:
  call void @work(ptr %program, ptr %scratch)
  br label %leave
leave:
  %out = atomicrmw sub ptr %attached, i32 1 seq_cst
  br label %rest
end:
  ret void
}

; Runs a program with `helpers` helpers. Returns when all launches are done and no helper reads the program any more.
define void @run(ptr %pool, ptr %program, ptr %scratch, i32 %helpers) {
entry:
  %open = getelementptr i8, ptr %pool, i64 $pool.program
  %attached = getelementptr i8, ptr %pool, i64 $pool.attached
  %n = load i64, ptr %program
  %list.from = getelementptr i8, ptr %program, i64 $program.launches
  %list = load ptr, ptr %list.from
  %leading = call i32 @llvm.ctlz.i32(i32 %helpers, i1 false)
  %bits = sub i32 36, %leading                      ; a share is blocks >> bits: at least 16 shares for each worker
  %bits64 = zext i32 %bits to i64
  br label %reset
reset:                                              ; sets each launch's `next`, `done` and `share`
  %i = phi i64 [0, %entry], [%i.next, %clear]
  %some = icmp ult i64 %i, %n
  br i1 %some, label %clear, label %publish
clear:
  %place = getelementptr ptr, ptr %list, i64 %i
  %l = load ptr, ptr %place
  %next = getelementptr i8, ptr %l, i64 $launch.next
  %done = getelementptr i8, ptr %l, i64 $launch.done
  store i64 0, ptr %next
  store i64 0, ptr %done
  %blocks.from = getelementptr i8, ptr %l, i64 $launch.n_blocks
  %blocks = load i64, ptr %blocks.from
  %part = lshr i64 %blocks, %bits64
  %share = call i64 @llvm.umax.i64(i64 %part, i64 1)
  %share.to = getelementptr i8, ptr %l, i64 $launch.share
  store i64 %share, ptr %share.to
  %i.next = add i64 %i, 1
  br label %reset
publish:
  %alone = icmp eq i32 %helpers, 0
  br i1 %alone, label %only, label %announce
only:
  call void @work(ptr %program, ptr %scratch)
  ret void
announce:
  store atomic ptr %program, ptr %open seq_cst, align 8
  br label %wake
wake:
  %k = phi i32 [0, %announce], [%k.next, %wake]
  %ignored = call i32 @sem_post(ptr %pool)
  %k.next = add i32 %k, 1
  %again = icmp ult i32 %k.next, %helpers
  br i1 %again, label %wake, label %self
self:
  call void @work(ptr %program, ptr %scratch)
  store atomic ptr null, ptr %open seq_cst, align 8
  br label %quiet
quiet:                                              ; `attached`: helpers that may still read the program
  %busy = load atomic i32, ptr %attached seq_cst, align 4
  %still = icmp ne i32 %busy, 0
  br i1 %still, label %yield, label %end
yield:
  %ignored2 = call i32 @sched_yield()
  br label %quiet
end:
  ret void
}

; Ends the helpers of a pool.
define void @close(ptr %pool, i32 %helpers) {
entry:
  %open = getelementptr i8, ptr %pool, i64 $pool.program
  store atomic i64 1, ptr %open seq_cst, align 8
  br label %check
check:
  %k = phi i32 [0, %entry], [%k.next, %wake]
  %more = icmp ult i32 %k, %helpers
  br i1 %more, label %wake, label %end
wake:
  %ignored = call i32 @sem_post(ptr %pool)
  %k.next = add i32 %k, 1
  br label %check
end:
  ret void
}

; Nanoseconds of a clock that nobody sets.
define internal i64 @now() {
  %time = alloca [2 x i64], align 8
  %ignored = call i32 @clock_gettime(i32 $clock.monotonic, ptr %time)
  %seconds = load i64, ptr %time
  %rest.from = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.from
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %rest
  ret i64 %now
}

; Answers requests that another processor, a card, raises in memory (serving.py says what the words of the mail mean): it
; runs the program of each request, until somebody stops it. It looks for the next request without a sleep at first, then
; with sleeps of a share of the time since the last one. Where the service has a function `bring`, it calls that first
; if something that the request wants has no place. Returns 0 when stopped, 1 after a program that failed, 2 after a
; request for which there is no program, and 3 where `bring` failed.
define i32 @serve(ptr %pool, ptr %service, ptr %scratch) {
entry:
  %mail.from = getelementptr i8, ptr %service, i64 $service.mail
  %mail = load ptr, ptr %mail.from
  %table.from = getelementptr i8, ptr %service, i64 $service.table
  %table = load ptr, ptr %table.from
  %layers.from = getelementptr i8, ptr %service, i64 $service.n_layers
  %layers = load i32, ptr %layers.from
  %sizes.from = getelementptr i8, ptr %service, i64 $service.n_sizes
  %sizes = load i32, ptr %sizes.from
  %stop = getelementptr i8, ptr %service, i64 $service.stop
  %served = getelementptr i8, ptr %service, i64 $service.served
  %products = getelementptr i8, ptr %service, i64 $service.products
  %busy = getelementptr i8, ptr %service, i64 $service.busy
  %latest = getelementptr i8, ptr %service, i64 $service.program
  %request = getelementptr i8, ptr %mail, i64 $mail.request
  %answer = getelementptr i8, ptr %mail, i64 $mail.answer
  %first = load atomic i32, ptr %answer seq_cst, align 4
  %start = call i64 @now()
  br label %look
look:
  %seen = phi i32 [%first, %entry], [%seen, %spin], [%seen, %sleep], [%asked, %answered]
  %since = phi i64 [%start, %entry], [%since, %spin], [%since, %sleep], [%end, %answered]
  %halt = load atomic i32, ptr %stop seq_cst, align 4
  %halted = icmp ne i32 %halt, 0
  br i1 %halted, label %stopped, label %read
read:
  %asked = load atomic i32, ptr %request seq_cst, align 4
  %nothing = icmp eq i32 %asked, %seen
  br i1 %nothing, label %idle, label %find
idle:
  %time = call i64 @now()
  %waited = sub i64 %time, %since
  %short = icmp ult i64 %waited, $service.spin
  br i1 %short, label %spin, label %sleep
spin:
  $cpu_pause
  br label %look
sleep:
  %share = udiv i64 %waited, $service.share
  %pause = call i64 @llvm.umin.i64(i64 %share, i64 $service.most_pause)
  %micros = udiv i64 %pause, 1000
  %micros32 = trunc i64 %micros to i32
  %ignored = call i32 @usleep(i32 %micros32)
  br label %look
find:
  %layer.from = getelementptr i8, ptr %mail, i64 $mail.layer
  %layer = load i32, ptr %layer.from
  %size.from = getelementptr i8, ptr %mail, i64 $mail.size
  %size = load i32, ptr %size.from
  %wanted.from = getelementptr i8, ptr %mail, i64 $mail.products
  %wanted = load i32, ptr %wanted.from
  %known.layer = icmp ult i32 %layer, %layers
  %known.size = icmp ult i32 %size, %sizes
  %known = and i1 %known.layer, %known.size
  br i1 %known, label %look.up, label %unknown
look.up:
  %line = mul i32 %layer, %sizes
  %at = add i32 %line, %size
  %at64 = zext i32 %at to i64
  %entry.at = mul i64 %at64, 16
  %place = getelementptr i8, ptr %table, i64 %entry.at
  %program = load ptr, ptr %place
  %helpers.from = getelementptr i8, ptr %place, i64 8
  %helpers = load i32, ptr %helpers.from
  %missing = icmp eq ptr %program, null
  br i1 %missing, label %unknown, label %go
go:
  store ptr %program, ptr %latest
  %begin = call i64 @now()
  %bring.from = getelementptr i8, ptr %service, i64 $service.bring
  %bring = load ptr, ptr %bring.from
  %never = icmp eq ptr %bring, null
  br i1 %never, label %compute, label %search
search:                                             ; whether the first `products` numbers in `wanted` have a place
  %list.from = getelementptr i8, ptr %service, i64 $service.wanted
  %list = load ptr, ptr %list.from
  %places.from = getelementptr i8, ptr %service, i64 $service.places
  %places = load ptr, ptr %places.from
  %layer64 = zext i32 %layer to i64
  %lines.at = getelementptr ptr, ptr %places, i64 %layer64
  %lines = load ptr, ptr %lines.at
  br label %next
next:
  %i = phi i32 [0, %search], [%i.next, %see]
  %all = icmp eq i32 %i, %wanted
  br i1 %all, label %compute, label %see
see:
  %i.next = add i32 %i, 1
  %i64 = zext i32 %i to i64
  %number.at = getelementptr i32, ptr %list, i64 %i64
  %number = load i32, ptr %number.at
  %number64 = zext i32 %number to i64
  %number.bytes = shl i64 %number64, 4
  %codes.at = getelementptr i8, ptr %lines, i64 %number.bytes
  %codes = load i64, ptr %codes.at
  %absent = icmp eq i64 %codes, 0
  br i1 %absent, label %fetch, label %next
fetch:
  %trouble = call i32 %bring(i32 %layer, i32 %wanted)
  %fetched = icmp eq i32 %trouble, 0
  br i1 %fetched, label %compute, label %lost
compute:
  call void @run(ptr %pool, ptr %program, ptr %scratch, i32 %helpers)
  %end = call i64 @now()
  %failed.from = getelementptr i8, ptr %program, i64 $program.failed
  %failed = load atomic i64, ptr %failed.from seq_cst, align 8
  %bad = icmp ne i64 %failed, 0
  br i1 %bad, label %broken, label %answered
answered:
  %took = sub i64 %end, %begin
  %n.before = load i64, ptr %served
  %n.after = add i64 %n.before, 1
  store i64 %n.after, ptr %served
  %products.before = load i64, ptr %products
  %wanted64 = zext i32 %wanted to i64
  %products.after = add i64 %products.before, %wanted64
  store i64 %products.after, ptr %products
  %busy.before = load i64, ptr %busy
  %busy.after = add i64 %busy.before, %took
  store i64 %busy.after, ptr %busy
  store ptr null, ptr %latest
  store atomic i32 %asked, ptr %answer seq_cst, align 4
  br label %look
stopped:
  ret i32 0
broken:
  ret i32 1
unknown:
  ret i32 2
lost:
  ret i32 3
}
